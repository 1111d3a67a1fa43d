"""Telling people of alerts: each once, the latest state only, for as long as it takes, without ever holding up the teller.

A `Notifier` has a thread of its own and one `Channel` (an Alertmanager, a webhook). What is to be told waits in an `Outbox`,
which decides and does no I/O: what is told to whom is there to be tested with a told time.

    notifier = Notifier(Webhook("https://hooks.example/allocscope"))
    notifier.start()
    notifier.publish(changes)            # of every `advance`; returns at once
    notifier.close(timeout_s=3)

Whoever restarts publishes the alerts that fire anew, and those that resolved so lately that it may not have been told; nothing is
kept on disk here.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from allocscope.alerts.rules import Severity, Subject
from allocscope.alerts.states import Alert, AlertState

_log = logging.getLogger(__name__)

CAPACITY = 10_000
"""Alerts that may wait to be told: more than a fleet of a thousand devices has at once."""
GIVE_UP_AFTER_S = 900.0
"""A resolution that could not be told for so long is old news. What still fires is told as long as it fires."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
"""Between tries: doubled from the first to the longest, each time by a random half less."""
LONGEST_RETRY_AFTER_S = 300.0
"""A receiver's Retry-After is honoured up to here."""


class NotifyError(Exception):
    """What goes wrong in telling.

    NotifyError
    ├── AddressError     an address that cannot be one (`allocscope.alerts.notify_http`)
    └── DeliveryError    a receiver did not take it
    """


class DeliveryError(NotifyError):
    """A receiver did not take it. `reason` is a fixed word for counters, the text is for people."""

    def __init__(self, reason: str, text: str, *, again: bool, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.again = again
        """Whether trying again can help."""
        self.retry_after_s = retry_after_s


Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """What is to be told: an alert's state, by the teller's clock (an alert's own times are by its subject's)."""

    alert: Alert
    at_us: int
    """When it began to fire."""
    resolved_us: int | None = None
    """When it resolved; None: it fires."""
    put_s: float = 0.0
    """When it came to wait, by the monotonic clock."""

    @property
    def key(self) -> Key:
        """Which alert it is."""
        return tuple(sorted(self.alert.labels.items()))

    @property
    def firing(self) -> bool:
        """Whether it fires, or has resolved."""
        return self.resolved_us is None

    @property
    def trouble(self) -> tuple[str, Subject]:
        """What it is about, at any severity."""
        family, _, subject = self.alert.condition.trouble
        return family, subject

    @property
    def severity(self) -> Severity:
        """How grave it is."""
        return self.alert.condition.rule.severity


@dataclass(slots=True)
class _Standing:
    """An alert that fires."""

    notice: Notice
    muted: bool = False
    """Not told yet, and not worth telling while a graver one of the same trouble fires."""
    tried: bool = False
    """Somebody may know of it, so that its resolution must be told."""
    told: bool = False


class Outbox:
    """What is to be told, the latest state of each alert, oldest first. Told the time; no I/O; not thread-safe."""

    def __init__(
        self,
        *,
        refresh_s: float | None = None,
        lingers: bool = False,
        capacity: int = CAPACITY,
        give_up_after_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        self._refresh_s, self._lingers = refresh_s, lingers
        self._capacity, self._give_up_after_s = capacity, give_up_after_s
        self._standing: dict[Key, _Standing] = {}
        self._by_trouble: dict[tuple[str, Subject], dict[Key, _Standing]] = {}
        self._waiting: dict[Key, Notice] = {}
        self._before: dict[Key, _Standing] = {}
        """Of those whose resolution waits and was not tried yet: as they stood, and as they are still known to whoever was told."""
        self._lingering: dict[Key, tuple[float, Notice]] = {}
        """Of those that stand, which have resolved, and until when they are told of as firing all the same."""
        self._refreshed_s = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def put(self, alert: Alert, *, wall_us: int, now_s: float) -> int:
        """An alert began to fire, resolved, or says anew that it fires. How many had to be dropped for it."""
        if alert.state is AlertState.FIRING:
            self._put_firing(Notice(alert, wall_us, put_s=now_s))
        elif alert.state is AlertState.RESOLVED:
            self._put_resolved(Notice(alert, wall_us, wall_us, put_s=now_s))
        return self._drop_the_oldest()

    def _put_firing(self, notice: Notice) -> None:
        known = self._standing.get(notice.key)
        if known is not None:  # the same state: only its words are newer
            is_news = known.notice.alert.condition.advice is None and notice.alert.condition.advice is not None
            known.notice = replace(known.notice, alert=notice.alert)
            self._lingering.pop(notice.key, None)
            if notice.key in self._waiting or (is_news and not known.muted):
                self._waiting[notice.key] = known.notice
            return
        if not self._standing:
            self._refreshed_s = notice.put_s
        untold = self._waiting.pop(notice.key, None)  # the resolution of its last time
        before = self._before.pop(notice.key, None)
        if before is not None and before.told:
            self._stand(before)
            self._put_firing(notice)
            return
        self._stand(_Standing(notice, tried=untold is not None))
        self._waiting[notice.key] = notice
        self._mute(notice.trouble)

    def _stand(self, standing: _Standing) -> None:
        notice = standing.notice
        self._standing[notice.key] = standing
        self._by_trouble.setdefault(notice.trouble, {})[notice.key] = standing

    def _put_resolved(self, notice: Notice) -> None:
        known = self._standing.get(notice.key)
        left_s = _left_s(known.notice if known else None, notice) if self._lingers else 0.0
        if left_s > 0 and known is None:
            return  # of before a restart: it ends there by itself, late enough that somebody hears of it
        if left_s > 0:
            self._lingering[notice.key] = notice.put_s + left_s, notice
        else:
            self._end(notice)

    def _end(self, notice: Notice) -> None:
        known = self._forget(notice.key)
        self._waiting.pop(notice.key, None)
        if known is None or known.tried or not known.muted:
            at_us = known.notice.at_us if known else notice.at_us
            self._waiting[notice.key] = replace(notice, at_us=at_us, resolved_us=max(notice.at_us, at_us))
            if known is not None:
                self._before[notice.key] = known
        self._mute(notice.trouble)

    def _forget(self, key: Key) -> _Standing | None:
        known = self._standing.pop(key, None)
        self._lingering.pop(key, None)
        if known is not None:
            same = self._by_trouble[known.notice.trouble]
            del same[key]
            if not same:
                del self._by_trouble[known.notice.trouble]
        return known

    def _mute(self, trouble: tuple[str, Subject]) -> None:
        """Of one trouble's alerts only the gravest are to be told; what was told stays told until it resolves."""
        same = self._by_trouble.get(trouble, {})
        gravest = max((s.notice.severity.level for s in same.values()), default=0)
        for key, standing in same.items():
            muted = not standing.told and standing.notice.severity.level < gravest
            if muted:
                self._waiting.pop(key, None)
            elif standing.muted:
                self._waiting[key] = standing.notice
            standing.muted = muted

    def _drop_the_oldest(self) -> int:
        waiting = len(self._waiting)
        for key in _oldest(self._standing, len(self._standing) - self._capacity):
            self._forget(key)
            self._waiting.pop(key, None)
        for key in _oldest(self._waiting, len(self._waiting) - self._capacity):
            del self._waiting[key]
            self._before.pop(key, None)
        return waiting - len(self._waiting)

    def take(self, at_most: int) -> tuple[Notice, ...]:
        """The oldest that wait, to be tried now and then settled by `delivered` or `failed`."""
        keys = _oldest(self._waiting, at_most)
        for key in keys:
            self._before.pop(key, None)
            if key in self._standing:
                self._standing[key].tried = True
        return tuple(self._waiting.pop(key) for key in keys)

    def end_lingering(self, now_s: float) -> None:
        """What has lingered for its time is over."""
        for until_s, notice in list(self._lingering.values()):
            if until_s <= now_s:
                self._end(replace(notice, put_s=until_s))

    def refresh(self, now_s: float) -> None:
        """Where the channel wants it, what fires waits to be told anew once its time has come."""
        if self._refresh_s is None or now_s - self._refreshed_s < self._refresh_s:
            return
        self._refreshed_s = now_s
        for key, standing in self._standing.items():
            if not standing.muted:
                self._waiting.setdefault(key, standing.notice)

    def due_in_s(self, now_s: float) -> float | None:
        """How long until there is something to take; None: until something is put."""
        if self._waiting:
            return 0.0
        due_s = [until_s for until_s, _ in self._lingering.values()]
        if self._refresh_s is not None and self._standing:
            due_s.append(self._refreshed_s + self._refresh_s)
        return max(min(due_s) - now_s, 0.0) if due_s else None

    def delivered(self, notices: Iterable[Notice]) -> None:
        """They were told."""
        for notice in notices:
            for standing in filter(None, (self._standing.get(notice.key), self._before.get(notice.key))):
                if notice.firing and standing.notice.at_us == notice.at_us:
                    standing.told, standing.muted = True, False

    def failed(self, notices: Iterable[Notice], now_s: float) -> int:
        """They are to be tried again, behind the others, unless there is newer to say or it is too late; how many are given up."""
        given_up = 0
        for notice in notices:
            standing = self._standing.get(notice.key)
            if notice.key in self._waiting or (notice.firing and standing is None):
                continue
            if standing is not None:
                standing.tried = True
                if notice.firing and not standing.muted:
                    self._waiting[notice.key] = standing.notice
            elif now_s - notice.put_s < self._give_up_after_s:
                self._waiting[notice.key] = notice
            else:
                given_up += 1
        return given_up

    def clear(self) -> int:
        """Nothing waits any more, nothing stands; how many waited."""
        waiting = len(self._waiting)
        self._waiting, self._standing, self._by_trouble, self._lingering, self._before = {}, {}, {}, {}, {}
        return waiting


def _left_s(begun: Notice | None, resolved: Notice) -> float:
    """Of an alert's keep-firing time, where it resolved before it had fired for so long: its job has ended."""
    alert = resolved.alert
    fired_for_us = resolved.at_us - begun.at_us if begun else (alert.resolved_us or 0) - (alert.fired_us or 0)
    return alert.condition.rule.keep_firing_for_s - max(fired_for_us, 0) / 1e6


def _oldest(by_key: Iterable[Key], count: int) -> list[Key]:
    return list(islice(by_key, max(count, 0)))


class Channel(Protocol):
    """A way to tell somebody."""

    @property
    def name(self) -> str:
        """For labels and logs; holds no secret."""
        ...

    @property
    def batch(self) -> int:
        """How many notices one delivery takes."""
        ...

    @property
    def refresh_s(self) -> float | None:
        """How often what fires must be told anew; None: once is enough."""
        ...

    @property
    def lingers(self) -> bool:
        """Whether an alert whose job ended at once is to fire there for its keep-firing time, lest nobody hears of it."""
        ...

    def send(self, notices: Sequence[Notice]) -> None:
        """Deliver them, or raise DeliveryError. May take its time, within a limit."""

    def close(self) -> None:
        """Let go of connections."""


class Observer(Protocol):
    """What a notifier tells of itself; called on its thread and on publishers'."""

    def delivered(self, channel: str, count: int, duration_s: float) -> None:
        """So many notices, in so long."""

    def failed(self, channel: str, count: int, reason: str, duration_s: float, *, again: bool) -> None:
        """So many notices did not get through; whether they are tried again."""

    def dropped(self, channel: str, count: int, reason: str) -> None:
        """So many notices will never be told: `full`, `too_old`, `closed`."""


class Unobserved:
    """Nobody wants to know."""

    def delivered(self, channel: str, count: int, duration_s: float) -> None:
        """Nothing."""

    def failed(self, channel: str, count: int, reason: str, duration_s: float, *, again: bool) -> None:
        """Nothing."""

    def dropped(self, channel: str, count: int, reason: str) -> None:
        """Nothing."""


class Notifier:
    """One channel's thread."""

    def __init__(
        self,
        channel: Channel,
        *,
        observer: Observer | None = None,
        capacity: int = CAPACITY,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        first_wait_s: float = FIRST_WAIT_S,
        longest_wait_s: float = LONGEST_WAIT_S,
        wall_clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._channel, self._observer = channel, observer or Unobserved()
        self._outbox = Outbox(
            refresh_s=channel.refresh_s, lingers=channel.lingers, capacity=capacity, give_up_after_s=give_up_after_s
        )
        self._first_wait_s, self._longest_wait_s = first_wait_s, longest_wait_s
        self._wall_clock, self._draw = wall_clock, draw
        self._changed = threading.Condition()
        self._closing = False
        self._failures = 0
        self._not_before_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"notify {channel.name}", daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many notices wait."""
        with self._changed:
            return len(self._outbox)

    def publish(self, alerts: Iterable[Alert]) -> None:
        """Alerts that began to fire or resolved; one that still fires may be published again, for its newer words.

        The first time that these have advice they are told at once, and otherwise when it is told of for another reason.
        """
        wall_us, now_s = round(self._wall_clock() * 1e6), time.monotonic()
        with self._changed:
            dropped = sum(self._outbox.put(alert, wall_us=wall_us, now_s=now_s) for alert in alerts)
            self._changed.notify()
        if dropped:
            self._observer.dropped(self._channel.name, dropped, "full")

    def close(self, timeout_s: float) -> int:
        """Try each that waits once more, for no longer than that; how many were not told."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._changed:
            left = self._outbox.clear()
        if left:
            self._observer.dropped(self._channel.name, left, "closed")
        return left

    def _run(self) -> None:
        try:
            while notices := self._next():
                self._deliver(notices)
        finally:
            self._channel.close()

    def _next(self) -> tuple[Notice, ...]:
        """Waits for something to tell; nothing: it is over."""
        with self._changed:
            while not self._closing:
                now_s = time.monotonic()
                self._outbox.end_lingering(now_s)
                self._outbox.refresh(now_s)
                due_in_s = self._outbox.due_in_s(now_s)
                wait_s = None if due_in_s is None else max(due_in_s, self._not_before_s - now_s)
                if wait_s == 0.0 and len(self._outbox):
                    return self._outbox.take(self._channel.batch)
                self._changed.wait(wait_s)
            self._outbox.end_lingering(math.inf)
            return self._outbox.take(self._channel.batch)

    def _deliver(self, notices: tuple[Notice, ...]) -> None:
        began_s = time.monotonic()
        try:
            self._channel.send(notices)
        except DeliveryError as failure:
            self._settle_failure(notices, failure, time.monotonic() - began_s)
        except Exception as error:  # noqa: BLE001 (a channel's mistake must not end the telling of everything else)
            mistake = DeliveryError("error", f"{type(error).__name__}: {error}", again=False)
            self._settle_failure(notices, mistake, time.monotonic() - began_s)
        else:
            self._settle_success(notices, time.monotonic() - began_s)

    def _settle_success(self, notices: tuple[Notice, ...], duration_s: float) -> None:
        if self._failures:
            _log.info("%s takes alerts again", self._channel.name)
        self._failures, self._not_before_s = 0, 0.0
        with self._changed:
            self._outbox.delivered(notices)
        self._observer.delivered(self._channel.name, len(notices), duration_s)

    def _settle_failure(self, notices: tuple[Notice, ...], failure: DeliveryError, duration_s: float) -> None:
        name, count, now_s, closing = self._channel.name, len(notices), time.monotonic(), self._closing
        if not self._failures or not failure.again:
            _log.warning("%s did not take %d alerts: %s", name, count, failure)
        self._observer.failed(name, count, failure.reason, duration_s, again=failure.again and not closing)
        if closing:
            self._observer.dropped(name, count, "closed")
        elif failure.again:
            self._failures += 1
            self._not_before_s = now_s + self._wait_s(failure.retry_after_s)
            with self._changed:
                given_up = self._outbox.failed(notices, now_s)
            if given_up:
                self._observer.dropped(name, given_up, "too_old")

    def _wait_s(self, retry_after_s: float | None) -> float:
        doubled_s = min(self._first_wait_s * 2.0 ** min(self._failures - 1, 30), self._longest_wait_s)
        jittered_s = doubled_s * (1 - self._draw() / 2)
        return max(jittered_s, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))
