"""Waiting for advice that is still to come; what becomes of it is told on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

from allocscope.cli.ask import Collector, Json, Unanswered, piece
from allocscope.cli.capture_owner import printable
from allocscope.cli.capture_wait import EVERY_S, STILL_TO_COME, whom

REPLAYED = "the snapshot is here; its requests are replayed under other settings"


class Missing(Exception):  # noqa: N818 (it names what happened)
    """What was waited for does not come, and why."""


def order_fresh(collector: Collector, job: str, rank: int | None, history_s: float) -> str:
    """Have the job's history recorded; the capture's id. Unanswered, Missing."""
    if not collector.get(f"jobs/{piece(job)}/advice", {"limit": 1})["is_made_here"]:
        raise Missing(f"the collector at {collector.url} replays nothing: its setting `advice` is false")
    wanted: dict[str, Any] = {"history_s": history_s, **({} if rank is None else {"rank": rank})}
    [ordered] = collector.post(f"jobs/{piece(job)}/captures", wanted)["items"]
    return str(ordered["capture_id"])


def wait_for(collector: Collector, path: str, params: Json, timeout_s: float) -> dict[str, Any]:
    """What there is once nothing of it is still to come, or that time is over. With `params` of a capture: once there is what came
    of that. Unanswered: from the beginning no collector answered. Missing: nothing will come of the capture.
    """
    began_s, said, found = time.monotonic(), "", None
    while True:
        try:
            found = collector.get(path, params)
            says = _still_to_come(collector, found, params.get("capture"))
        except Unanswered as error:  # it may be restarted meanwhile
            if found is None or error.code is not None:
                raise
            says = str(error)
        if says is None or time.monotonic() - began_s >= timeout_s:
            return found
        if says != said:
            print(printable(says), file=sys.stderr, flush=True)
        said = says
        time.sleep(EVERY_S)


def _still_to_come(collector: Collector, found: Json, capture_id: str | None) -> str | None:
    """What is waited for, in words; None: nothing is. Missing."""
    if capture_id is None:
        return _words(found["under_way"][0]) if found["under_way"] else None
    if found["items"]:
        return None
    about = collector.get(f"captures/{piece(capture_id)}/about")
    if about["state"] not in STILL_TO_COME and not any(one["capture_id"] == capture_id for one in found["under_way"]):
        if about["state"] == "kept" and about["history_entries"]:
            return REPLAYED  # it came between the two questions
        why = about["problem"] or "it has no history: the program may have asked for nothing meanwhile"
        raise Missing(printable(f"{whom(about)}: nothing can be replayed: {why}", 2000))
    return _words(about)


def _words(about: Json) -> str:
    rank = "" if about["rank"] is None else f"rank {about['rank']} "
    return f"{rank}on {about['node']}: {STILL_TO_COME.get(about['state'], REPLAYED)}"
