"""`allocscope bill JOB`: where every byte of the devices is that a job uses."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

from allocscope.cli.ask import Json, Row, answer, parser
from allocscope.cli.figures import size

HELP = "where every byte of a job's devices is"


def main(arguments: list[str]) -> int:
    """Ask, and print."""
    asking = parser("bill", HELP)
    asking.add_argument("job", metavar="JOB")
    options = asking.parse_args(arguments)
    return answer(options, f"jobs/{quote(options.job, safe='')}/bill", {}, _rows)


def _rows(got: Json) -> Iterator[Row]:
    yield "node", "gpu", "line", "whose", "bytes", ""
    for device in got["devices"]:
        where = device["node"], str(device["gpu"])
        if device["bill"] is None:
            yield *where, "not known", "", "", ""
            continue
        for line in device["bill"]["lines"]:
            about = size(line["bytes"]) + ("" if line["exact"] else ", about")
            yield *where, line["line"], _whose(line), str(line["bytes"]), about
        total = device["bill"]["total_bytes"]
        yield *where, "total", "", str(total), size(total)


def _whose(line: Json) -> str:
    if line["job"] is None:
        return line["process_id"] or ""
    return line["job"] if line["rank"] is None else f"{line['job']} rank {line['rank']}"
