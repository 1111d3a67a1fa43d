"""`allocscope jobs`: the fleet's jobs, each with the allocator that is worst off."""

from __future__ import annotations

from collections.abc import Iterator

from allocscope.cli.ask import PAGE, Json, Row, answer, parser
from allocscope.model.figures import duration, size

HELP = "the fleet's jobs, with state, cause, headroom and time left"
WORDS = (
    "Of each job its allocator that is worst off. headroom: the largest request that would succeed now, "
    "while at a peak of the job's step less fits; largest request: the largest that the job makes; left: until it runs out "
    "of memory, if things go on so."
)


def main(arguments: list[str]) -> int:
    """Ask, and print."""
    options = parser("jobs", f"{HELP}. {WORDS}").parse_args(arguments)
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
