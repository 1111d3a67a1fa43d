"""`allocscope devices`: the fleet's devices and who uses them, with a probe and without."""

from __future__ import annotations

from collections.abc import Iterator

from allocscope.cli.ask import PAGE, Collector, Json, Row, answer, parser, read_name
from allocscope.cli.capture_owner import printable
from allocscope.cli.known import check_node
from allocscope.cli.owner_text import owner_text
from allocscope.model.figures import size

HELP = "the fleet's devices, and whose the processes on them are"


def main(arguments: list[str]) -> int:
    """Ask, and print."""
    asking = parser("devices", HELP)
    asking.add_argument("--node", type=read_name, metavar="NODE", help="of this node alone (default: of all)")
    options = asking.parse_args(arguments)

    def known(collector: Collector) -> None:
        if options.node is not None:
            check_node(collector, options.node)

    return answer(options, "devices", {"node": options.node, "limit": PAGE}, _rows, known=known)


def _rows(got: Json) -> Iterator[Row]:
    yield "node", "gpu", "pid", "process", "job", "uses", "whose"
    for device in got["items"]:
        where = device["node"], str(device["gpu"])
        if not device["processes"]:
            yield *where, "", "", "", "", device["problem"] or ""
        for process in device["processes"]:
            yield (
                *where,
                "" if process["pid"] is None else str(process["pid"]),
                printable(process["name"] or ""),
                job_text(process) or "no probe",
                size(process["used_bytes"]),
                owner_text(process.get("owner")),
            )


def job_text(told: Json) -> str:
    """`llama rank 3`, of a process or a line; its process_id where its job is not known, "" where it has no probe."""
    if told["job"] is None:
        return told["process_id"] or ""
    return told["job"] if told["rank"] is None else f"{told['job']} rank {told['rank']}"
