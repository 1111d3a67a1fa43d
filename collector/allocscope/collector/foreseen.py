"""Captures that nobody needs to ask for: of an allocator whose forecast turns at_risk, with what it does then.

Used by the evaluator's thread. How many may be on order at a time, and how often an allocator may be captured, is held in the
database, so that it holds for all collectors on it together, and over their restarts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping

import structlog

from allocscope.collector.fleet import Watched
from allocscope.collector.observation import Observation
from allocscope.model import AllocatorRef, CaptureReason, Forecast, State
from allocscope.storage.captures import CaptureRecord, CaptureState, CaptureStore, OrderLimits
from allocscope.storage.errors import OrderedLately, StorageError, TooManyOrders

log = structlog.get_logger(__name__)

HISTORY_US, SHORTEST_HISTORY_US = 20_000_000, 1_000_000
MOST_HISTORY_ENTRIES = 200_000
AGAIN_AFTER_US = 900_000_000
"""An allocator whose forecast comes and goes is captured no more often."""
RETRY_AFTER_US = 30_000_000
"""Where as many are on order as may be."""
OF_JOB, OF_FLEET = 2, 8
"""On order at a time: the ranks of a job run out of memory alike, and what is wrong with many jobs is not theirs."""


class Foreseen:
    """Orders captures of allocators at risk."""

    def __init__(
        self, captures: CaptureStore, observation: Observation, *, wake: Callable[[], None], enabled: bool
    ) -> None:
        """`wake` is called when something was ordered; it must not block."""
        self._captures, self._observation, self._wake, self._enabled = captures, observation, wake, enabled
        self._at_risk: set[AllocatorRef] = set()
        self._wanted: dict[AllocatorRef, int] = {}
        """Of those, the ones to capture, and from when on."""

    def look(
        self, forecasts: Iterable[tuple[AllocatorRef, Forecast]], watched: Mapping[AllocatorRef, Watched], now_us: int
    ) -> None:
        """What was foreseen since the last look; `watched` are those that are there."""
        if not self._enabled:
            return
        for ref, forecast in forecasts:
            self._note(ref, forecast, now_us)
        for ref, from_us in list(self._wanted.items()):
            if ref not in watched:
                self._forget(ref)
            elif now_us >= from_us:
                self._order(watched[ref], now_us)
        self._at_risk = {ref for ref in self._at_risk if ref in watched}

    def _note(self, ref: AllocatorRef, forecast: Forecast, now_us: int) -> None:
        if forecast.state.level < State.AT_RISK.level:
            self._forget(ref)
        elif ref not in self._at_risk:
            self._at_risk.add(ref)
            self._wanted[ref] = now_us

    def _forget(self, ref: AllocatorRef) -> None:
        self._at_risk.discard(ref)
        self._wanted.pop(ref, None)

    def _order(self, one: Watched, now_us: int) -> None:
        limits = OrderLimits(1, OF_JOB, OF_FLEET, not_since_us=now_us - AGAIN_AFTER_US)
        try:
            self._captures.order([_record(one, now_us)], limits)
        except OrderedLately:
            del self._wanted[one.ref]
            return
        except TooManyOrders as error:
            self._wanted[one.ref] = now_us + RETRY_AFTER_US
            self._observation.captures_ordered.labels(CaptureReason.FORECAST.value, "refused").inc()
            log.debug("no capture of an allocator at risk by now", job=one.process.job, why=str(error))
            return
        except StorageError as error:
            self._wanted[one.ref] = now_us + RETRY_AFTER_US
            log.warning("no capture of an allocator at risk can be ordered now", why=str(error))
            return
        del self._wanted[one.ref]
        self._observation.captures_ordered.labels(CaptureReason.FORECAST.value, "ordered").inc()
        self._wake()


def _record(one: Watched, now_us: int) -> CaptureRecord:
    return CaptureRecord(
        secrets.token_hex(16),
        one.ref.process_id,
        one.process.job,
        one.node,
        CaptureReason.FORECAST,
        CaptureState.ORDERED,
        rank=one.process.rank,
        device_uuid=one.ref.device_uuid,
        history_us=_history_us(one.watch.forecast),
        most_history_entries=MOST_HISTORY_ENTRIES,
        ordered_us=now_us,
    )


def _history_us(forecast: Forecast | None) -> int:
    """Some steps of the job, and over before it dies."""
    left_s = forecast.seconds_to_oom if forecast else None
    if left_s is None:
        return HISTORY_US
    return max(min(HISTORY_US, round(left_s * 0.5e6)), SHORTEST_HISTORY_US)
