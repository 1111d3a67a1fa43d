"""Waiting for captures that were ordered: what becomes of them is told on standard error, in one line where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from allocscope.cli.ask import Collector, Json, Unanswered
from allocscope.cli.capture_owner import printable

EVERY_S = 0.5
STILL_TO_COME = {
    "ordered": "on order; its node was not told yet",
    "sent": "its node was told; the snapshot is being taken, or on its way",
}


class Waiting:
    """Orders that are waited for."""

    def __init__(self, collector: Collector, ordered: Sequence[Json]) -> None:
        self._collector = collector
        self.items: list[dict[str, Any]] = [dict(about) for about in ordered]
        """What is known of each by now, in the order of the order."""
        self._said = ""
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def wait(self, timeout_s: float) -> None:
        """Until none is still to come, or for no longer than that."""
        began_s = time.monotonic()
        self._say(None, 0.0)
        while True:
            trouble = self._look()
            waited_s = time.monotonic() - began_s
            self._say(trouble, waited_s)
            if not self._open() or waited_s >= timeout_s:
                break
            time.sleep(min(EVERY_S, timeout_s - waited_s))
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def how_to_fetch_later(self) -> str:
        """For who does not wait."""
        ids = [f"  allocscope capture --id {about['capture_id']}" for about in self.items]
        return "\n".join(["it is still on order; fetch it later:", *ids])

    def _open(self) -> list[dict[str, Any]]:
        return [about for about in self.items if about["state"] in STILL_TO_COME]

    def _look(self) -> str | None:
        """Why nothing is known now; a collector may be restarted meanwhile."""
        for about in self._open():
            try:
                about.update(self._collector.get(f"captures/{about['capture_id']}/about"))
            except Unanswered as error:
                return str(error)
        return None

    def _say(self, trouble: str | None, waited_s: float) -> None:
        said = trouble or _summary(self.items)
        if self._is_terminal:
            print(f"\r\x1b[K{said}, {waited_s:.0f} s", end="", file=sys.stderr, flush=True)
        elif said != self._said:
            print(said, file=sys.stderr, flush=True)
        self._said = said


def _summary(items: Iterable[Json]) -> str:
    """`train rank 3 on n1: on order`, or of several how many are how far."""
    known = list(items)
    if len(known) == 1:
        [about] = known
        return f"{whom(about)}: {STILL_TO_COME.get(about['state'], about['state'])}"
    states = [about["state"] for about in known]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def whom(about: Json) -> str:
    """Of whom a capture is."""
    rank = "" if about["rank"] is None else f" rank {about['rank']}"
    return printable(f"{about['job']}{rank} on {about['node']}")
