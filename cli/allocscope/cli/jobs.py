"""`allocscope jobs`: the fleet's jobs, each with the allocator that is worst off."""

from __future__ import annotations

from collections.abc import Iterator

from allocscope.cli.ask import PAGE, Json, Row, answer, parser
from allocscope.cli.figures import duration, size

HELP = "the fleet's jobs, with state, cause, headroom and time left"


def main(arguments: list[str]) -> int:
    """Ask, and print."""
    options = parser("jobs", HELP).parse_args(arguments)
    return answer(options, "jobs", {"limit": PAGE}, _rows)


def _rows(got: Json) -> Iterator[Row]:
    yield "job", "nodes", "ranks", "state", "cause", "headroom", "largest request", "left"
    for job in got["items"]:
        worst = job["worst"] or {}
        foreseen = worst.get("forecast") or {}
        state = job["state"] or ("" if job["live"] else "ended")
        yield (
            job["job"],
            ",".join(job["nodes"]),
            str(job["allocators_live"]),
            state,
            job["cause"] or "",
            size(foreseen.get("headroom_bytes")) if job["live"] else "",
            size(foreseen.get("request_bytes")) if job["live"] else "",
            duration(foreseen.get("seconds_to_oom")) if job["live"] else "",
        )
