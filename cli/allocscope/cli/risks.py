"""`allocscope risks`: the allocators that are not well, and why."""

from __future__ import annotations

from collections.abc import Iterator

from allocscope.cli.ask import PAGE, Json, Row, answer, parser
from allocscope.model.figures import duration

HELP = "the allocators that are not well, and why"


def main(arguments: list[str]) -> int:
    """Ask, and print."""
    asking = parser("risks", HELP)
    asking.add_argument(
        "--at-least",
        choices=("watch", "at_risk", "critical"),
        default="watch",
        help="those that are so badly off, or worse (default: watch)",
    )
    options = asking.parse_args(arguments)
    return answer(options, "risks", {"at_least": options.at_least, "limit": PAGE}, _rows)


def _rows(got: Json) -> Iterator[Row]:
    yield "job", "rank", "node", "gpu", "state", "cause", "left", "why"
    for risk in got["items"]:
        foreseen = risk["forecast"]
        rank, gpu = ("" if risk[name] is None else str(risk[name]) for name in ("rank", "gpu"))
        left = duration(foreseen["seconds_to_oom"])
        yield (
            risk["job"],
            rank,
            risk["node"],
            gpu,
            foreseen["state"],
            foreseen["cause"] or "",
            left,
            foreseen["summary"],
        )
