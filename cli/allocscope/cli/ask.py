"""Questions to a collector from the command line: `allocscope jobs`, `risks`, `bill JOB`, `alerts` are each a few lines on this.

Exit status: 0 answered, 1 the collector could not be reached or refused, 2 a wrong call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:9464"
WITHIN_S = 10.0
PAGE = 100

Json = Mapping[str, Any]
Row = Sequence[str]


def parser(name: str, does: str) -> argparse.ArgumentParser:
    """What all questions have in common."""
    made = argparse.ArgumentParser(prog=f"allocscope {name}", description=does, allow_abbrev=False)
    made.add_argument(
        "--url",
        default=os.environ.get("ALLOCSCOPE_URL", DEFAULT_URL),
        help=f"the collector's page (default: $ALLOCSCOPE_URL, or {DEFAULT_URL})",
    )
    made.add_argument("--json", action="store_true", help="as the collector's API gives it")
    return made


def answer(options: argparse.Namespace, path: str, params: Json, told: Callable[[Json], Iterable[Row]]) -> int:
    """Ask, and print what came: JSON, or the rows that `told` makes of it, the first of which are headings."""
    try:
        got = _ask(with_scheme(options.url), path, params)
    except _Unanswered as error:
        print(f"allocscope: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(got))
    else:
        rows = list(told(got))
        print(columns(rows))
        if len(rows) == 1:
            print("(none)")
    return 0


def with_scheme(url: str) -> str:
    """HOST:PORT alone is taken as http."""
    return url if "://" in url else f"http://{url}"


def columns(rows: Sequence[Row]) -> str:
    """Rows as aligned text; the last column is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


class _Unanswered(Exception):  # noqa: N818 (it names what happened)
    """The collector did not answer, or said no."""


def _ask(url: str, path: str, params: Json) -> dict[str, Any]:
    """One answer; of a list all its pages."""
    whole: dict[str, Any] = {}
    with httpx.Client(timeout=WITHIN_S) as client:
        cursor = None
        while True:
            page = _get(client, url, path, {**params, **({"cursor": cursor} if cursor else {})})
            if "items" not in page:
                return page
            whole = {"items": [*whole.get("items", ()), *page["items"]]}
            cursor = page.get("next_cursor")
            if not cursor or not page["items"]:
                return whole


def _get(client: httpx.Client, url: str, path: str, params: Json) -> dict[str, Any]:
    asked = {name: value for name, value in params.items() if value is not None}
    try:
        response = client.get(f"{url.rstrip('/')}/api/v1/{path}", params=asked)
        body: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise _Unanswered(f"no collector answers at {url} ({error}); name it with --url or ALLOCSCOPE_URL") from error
    if response.is_error:
        raise _Unanswered(body.get("error", {}).get("message", f"{url} answered {response.status_code}"))
    return body
