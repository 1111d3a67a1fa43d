"""`allocscope bill JOB`: where every byte of the devices is that a job uses."""

from __future__ import annotations

from collections.abc import Iterator

from allocscope.cli.ask import Json, Row, answer, parser, piece, read_name
from allocscope.cli.devices import job_text
from allocscope.cli.owner_text import process_text
from allocscope.model.figures import size

HELP = "where every byte of a job's devices is"
MOST_NAMED = 3
"""Processes without a probe that a line names; `allocscope devices` names all."""
NOTHING = "no device holds anything of it now: it has ended, or has used none yet (see allocscope jobs)"


def main(arguments: list[str]) -> int:
    """Ask, and print."""
    asking = parser("bill", HELP)
    asking.add_argument("job", type=read_name, metavar="JOB", help="its name, as allocscope jobs tells it")
    options = asking.parse_args(arguments)
    return answer(options, f"jobs/{piece(options.job)}/bill", {}, _rows, NOTHING)


def _rows(got: Json) -> Iterator[Row]:
    yield "node", "gpu", "line", "whose", "bytes", "size"
    for device in got["devices"]:
        where = device["node"], str(device["gpu"])
        if device["bill"] is None:
            yield *where, "not known", "", "", ""
            continue
        for line in device["bill"]["lines"]:
            about = size(line["bytes"]) + ("" if line["exact"] else ", about")
            yield *where, line["line"], _whose(line, device), str(line["bytes"]), about
        total = device["bill"]["total_bytes"]
        yield *where, "total", "", str(total), size(total)


def _whose(line: Json, device: Json) -> str:
    if line["line"] != "other_processes":
        return job_text(line)
    others = [process for process in device.get("processes", ()) if process["process_id"] is None]
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    return ", ".join(map(process_text, others[:MOST_NAMED])) + more
