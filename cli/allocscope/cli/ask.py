"""Questions to a collector from the command line: `allocscope jobs`, `risks`, `bill JOB`, `alerts` are each a few lines on this.
`allocscope capture` asks for more than one thing, and so uses `Collector` itself.

Exit status: 0 answered, 1 the collector could not be reached, refused, or knows no such job or node, 2 a wrong call.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from allocscope.cli.capture_owner import printable
from allocscope.cli.prose import fold, prose_width
from allocscope.model.figures import duration

DEFAULT_URL = "http://127.0.0.1:9464"
WITHIN_S = 10.0
PAGE = 100
OTHER_VERSION = "are it and this command of one version?"

LONGEST_TEXT = 2000
"""Of what others say."""

Json = Mapping[str, Any]
Row = Sequence[str]


def parser(name: str, does: str, example: str | None = None) -> argparse.ArgumentParser:
    """What all questions have in common. `example`: a call, where it is not plain."""
    made = argparse.ArgumentParser(
        prog=f"allocscope {name}",
        description=does,
        epilog=None if example is None else f"example: allocscope {name} {example}",
        allow_abbrev=False,
    )
    made.add_argument(
        "--url",
        default=os.environ.get("ALLOCSCOPE_URL", DEFAULT_URL),
        help=f"the collector's page (default: $ALLOCSCOPE_URL, or {DEFAULT_URL})",
    )
    made.add_argument(
        "--ca",
        default=os.environ.get("ALLOCSCOPE_CA") or None,
        metavar="FILE",
        help="PEM of the CA of an https collector (default: $ALLOCSCOPE_CA, or what this machine trusts)",
    )
    made.add_argument(
        "--token-file",
        default=os.environ.get("ALLOCSCOPE_TOKEN_FILE") or None,
        metavar="FILE",
        help="of one token, where the collector asks for one (default: $ALLOCSCOPE_TOKEN_FILE, or the token in $ALLOCSCOPE_TOKEN)",
    )
    made.add_argument("--json", action="store_true", help="as the collector's API gives it: sizes in bytes")
    return made


def read_name(told: str) -> str:
    """Of a job or a node, as an option or argument gives it."""
    if not told:
        raise argparse.ArgumentTypeError("a name is wanted, and none was given")
    return told


def answer(
    options: argparse.Namespace,
    path: str,
    params: Json,
    told: Callable[[Json], Iterable[Row]],
    nothing: str = "(none)",
    known: Callable[[Collector], None] | None = None,
) -> int:
    """Ask, and print what came: JSON, or the rows that `told` makes of it, the first of which are headings; or what `nothing` means.

    `known`: where a list is empty, raises Unanswered if that is since what it was asked of is not known at all.
    """
    try:
        with Collector.of(options) as collector:
            got = collector.all(path, params)
            if known is not None and not got.get("items"):
                known(collector)
            with understood(collector.url):
                rows = [] if options.json else list(told(got))
    except Unanswered as error:
        print(f"allocscope: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(got))
    else:
        print(columns(rows, prose_width()))
        if len(rows) == 1:
            print(nothing)
    return 0


@contextmanager
def understood(url: str) -> Iterator[None]:
    """What is read of answers within. Unanswered: they are not what a collector of this version says."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        told = f"{type(error).__name__}: {error}"
        raise Unanswered(f"what {url} says is not understood ({told}): {OTHER_VERSION}") from error


def piece(name: str) -> str:
    """A name as one piece of a path: of a job that is called `..` one would ask the whole fleet."""
    return quote(name, safe="").replace(".", "%2E")


def with_scheme(url: str) -> str:
    """HOST:PORT alone is taken as http."""
    return url if "://" in url else f"http://{url}"


def columns(rows: Sequence[Row], width: int | None = None) -> str:
    """Rows as aligned text; the last column is as long as it is. Of a row longer than `width`, what begins too late goes below it, folded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    ends = list(accumulate(each + 2 for each in widths[:-1]))
    beside = len(rows[0]) if width is None else max(sum(end - 2 <= width for end in ends), 1)
    return "\n".join(_line(row, widths, beside, width) for row in rows)


def _line(row: Row, widths: Sequence[int], beside: int, width: int | None) -> str:
    cells = [f"{cell:<{padded}}" for cell, padded in zip(row, widths, strict=True)]
    line = "  ".join(cells).rstrip()
    if width is None or len(line) <= width:
        return line
    below = "  ".join(cell for cell in row[beside:] if cell)
    return "\n".join(["  ".join(cells[:beside]).rstrip(), *([fold(f"    {below}", width)] if below else [])])


class Unanswered(Exception):  # noqa: N818 (it names what happened)
    """The collector did not answer, or said no; the text is for people."""

    def __init__(self, text: str, code: str | None = None, details: Json | None = None) -> None:
        """`code`: the collector's own word for it; None: it did not answer. `details`: what else it says of it."""
        super().__init__(printable(text, LONGEST_TEXT))
        self.code, self.details = code, details or {}


class Collector:
    """A collector that is asked."""

    def __init__(self, url: str, *, ca: str | None = None, token: str | None = None) -> None:
        """`ca`: a PEM file; None: what this machine trusts. Unanswered: it cannot be read, or a proxy that is wanted not be used.

        Nobody's proxy leads to this machine itself.
        """
        self.url = with_scheme(url)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        trust = _trust(ca) if self.url.startswith("https:") else False
        try:
            self._client = httpx.Client(
                timeout=WITHIN_S, headers=headers, verify=trust, trust_env=not _is_here(self.url)
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            text = f"{self.url} cannot be asked by the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names: {error}"
            raise Unanswered(f"{text}; NO_PROXY names hosts that need none") from error

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """The one that the command line names. Unanswered: a file that it names cannot be read."""
        return cls(options.url, ca=options.ca, token=_token(options.token_file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def all(self, path: str, params: Json) -> dict[str, Any]:
        """One answer; of a list all its pages. Unanswered."""
        items: list[Any] = []
        cursors: list[object] = []
        while True:
            page = self.get(path, {**params, **({"cursor": cursors[-1]} if cursors else {})})
            if "items" not in page:
                return page
            with understood(self.url):
                items += page["items"]
            cursor = page.get("next_cursor")
            if not cursor or not page["items"]:
                return {"items": items}
            if cursor in cursors:
                raise Unanswered(f"{self.url} gives the same page again and again: {OTHER_VERSION}")
            cursors.append(cursor)

    def get(self, path: str, params: Json | None = None) -> dict[str, Any]:
        """One answer. Unanswered."""
        asked = {name: value for name, value in (params or {}).items() if value is not None}
        return self._answer("GET", path, params=asked)

    def post(self, path: str, body: Json) -> dict[str, Any]:
        """What comes of an order. Unanswered."""
        return self._answer("POST", path, json=body)

    @contextmanager
    def download(self, path: str) -> Iterator[Iterator[bytes]]:
        """A file, in pieces. Unanswered."""
        with self._telling(), self._client.stream("GET", self._address(path)) as response:
            if not response.is_success:
                response.read()
                raise _refusal(response, self.url)
            yield response.iter_bytes()

    def _answer(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        with self._telling():
            response = self._client.request(method, self._address(path), **more)
        if not response.is_success:
            raise _refusal(response, self.url)
        try:
            body = response.json()
        except (ValueError, RecursionError) as error:
            raise Unanswered(_no_collector(self.url, "what it answers is no JSON")) from error
        if not isinstance(body, dict):
            raise Unanswered(_no_collector(self.url, "what it answers is no JSON object"))
        return body

    def _address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/api/v1/{path}"

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            if "CERTIFICATE_VERIFY_FAILED" not in str(error):
                raise Unanswered(_nobody(self.url, error)) from error
            text = f"the certificate of {self.url} is not trusted ({error}); name its CA with --ca or ALLOCSCOPE_CA"
            raise Unanswered(text) from error
        except httpx.TimeoutException as error:
            raise Unanswered(_nobody(self.url, f"nothing came within {duration(WITHIN_S)}")) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise Unanswered(_nobody(self.url, error)) from error


def _nobody(url: str, why: object) -> str:
    return f"no collector answers at {url} ({why}); name it with --url or ALLOCSCOPE_URL"


def _no_collector(url: str, why: str) -> str:
    return f"{url} answers, and not as a collector does ({why}); name one with --url or ALLOCSCOPE_URL"


def _trust(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise Unanswered(f"cannot use the CA in {ca}: {getattr(error, 'strerror', None) or error}") from error


def _is_here(url: str) -> bool:
    """Whether that is this machine, by its name alone."""
    with suppress(ValueError):
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    return False


def _token(path: str | None) -> str | None:
    if path is None:
        return _usable(os.environ.get("ALLOCSCOPE_TOKEN") or None, "ALLOCSCOPE_TOKEN")
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise Unanswered(f"cannot read the token in {path}: {getattr(error, 'strerror', None) or error}") from error
    return _usable(token, path)


def _usable(token: str | None, where: str) -> str | None:
    if token is not None and (not token.isascii() or not token.isprintable() or not token or " " in token):
        raise Unanswered(f"{where} must hold one token, of printable ASCII without spaces")
    return token


def _refusal(response: httpx.Response, url: str) -> Unanswered:
    """What the collector said, if it is one."""
    try:
        error = response.json()["error"]
        if error["code"] == "unauthenticated":
            return Unanswered(
                f"{url} asks for a token that it knows: --token-file or ALLOCSCOPE_TOKEN_FILE", error["code"]
            )
        return Unanswered(str(error["message"]), str(error["code"]), error.get("details"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Unanswered(_no_collector(url, f"{response.status_code} {_phrase(response.status_code)}"), "http_error")


def _phrase(status: int) -> str:
    """What a status means, as far as it has a name."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "?"
