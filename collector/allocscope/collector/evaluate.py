"""The thread that follows the fleet: what is stored is foreseen from, judged, kept and told. It never holds up the writer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import structlog

from allocscope.alerts.states import Alert
from allocscope.collector.advice_words import alert_words
from allocscope.collector.decode import Refusal
from allocscope.collector.fleet import Change, Fleet
from allocscope.collector.foreseen import Foreseen
from allocscope.collector.nodes import NodeState
from allocscope.collector.observation import Observation
from allocscope.collector.records import alert_record
from allocscope.collector.resume import PAGE, pages, resume
from allocscope.storage.advice import AdviceRecord
from allocscope.storage.errors import StorageError
from allocscope.storage.records import AlertRecord, NodeBatch
from allocscope.storage.repository import Repository

log = structlog.get_logger(__name__)

TICK_S = 1.0
BEHIND_SAMPLES = 10_000
"""Samples that wait; beyond them the thread judges less often, and takes a quarter of its time at most: storing comes first."""
MOST_SAMPLES = 100_000
"""Beyond them the oldest batches are not evaluated at all. They are stored; forecasts bear the gap."""
SAMPLES_AT_ONCE = 2_000
"""Of as many batches as wait: it costs about as much to judge one allocator as many, but ticks and alerts must not wait long."""
SILENT_HERE_US, ASK_EVERY_US = 30_000_000, 10_000_000
"""The database is asked for nodes that were not heard here for so long, so often: a daemon sends each ten seconds at least."""
MOST_UNSAVED = 10_000
"""Alerts that wait for a database that takes nothing."""


class Evaluator:
    """Follows what is stored."""

    def __init__(
        self,
        repository: Repository,
        observation: Observation,
        *,
        nodes: Callable[[], Sequence[NodeState]],
        publish: Callable[[Iterable[Alert]], None],
        foreseen: Foreseen,
        now_us: Callable[[], int],
        retire_after_s: float,
    ) -> None:
        self._repository, self._observation, self._foreseen = repository, observation, foreseen
        self._nodes, self._publish, self._now_us = nodes, publish, now_us
        self._retire_after_us = round(retire_after_s * 1e6)
        self.fleet = Fleet(retire_after_us=self._retire_after_us)
        self._unsaved: deque[AlertRecord] = deque(maxlen=MOST_UNSAVED)
        self._waiting: deque[tuple[NodeBatch, int]] = deque()
        self._refused: deque[tuple[str, Refusal]] = deque(maxlen=1000)
        self._advised: deque[AdviceRecord] = deque(maxlen=1000)
        self._passed_over: list[NodeBatch] = []
        """Batches that are not evaluated, since the last one that was."""
        self._waiting_samples = 0
        self._began_us = self._asked_us = 0
        self._changed = threading.Condition()
        self._closed = self._resumed = False
        self._thread = threading.Thread(target=self._run, name="evaluator", daemon=True)

    def start(self) -> None:
        """From here on what is put is evaluated."""
        self._began_us = self._now_us()
        self._thread.start()

    def put(self, batches: Sequence[NodeBatch], refused: Sequence[tuple[str, Refusal]] = ()) -> None:
        """What was just stored, and what was not, by node. Returns at once."""
        with self._changed:
            for batch in batches:
                samples = sum(map(len, batch.chunks))
                self._waiting.append((batch, samples))
                self._waiting_samples += samples
            self._refused.extend(refused)
            while self._waiting_samples > MOST_SAMPLES and len(self._waiting) > 1:
                passed_over, samples = self._waiting.popleft()
                self._passed_over.append(passed_over)
                self._waiting_samples -= samples
                self._observation.dropped.labels("samples", "evaluation_behind").inc(samples)
            self._changed.notify()

    def advise(self, records: Sequence[AdviceRecord]) -> None:
        """What would help, the oldest first; alerts say so with the next tick. Returns at once."""
        with self._changed:
            self._advised.extend(records)

    def close(self, timeout_s: float) -> None:
        """What waits is still evaluated, for no longer than that."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def behind(self) -> bool:
        """Whether more waits than can be judged in time."""
        return self._waiting_samples > BEHIND_SAMPLES

    def _run(self) -> None:
        while not self._resumed and not self._closed:
            self._guarded(self._resume)
            if not self._resumed:
                self._rest(TICK_S)
        if not self._resumed:
            return
        tick_at_s = time.monotonic()
        while True:
            batches = self._next(tick_at_s)
            if batches:
                self._guarded(partial(self._take, batches))
            if not batches or time.monotonic() >= tick_at_s:
                tick_at_s = time.monotonic() + TICK_S
                self._guarded(self._tick)
            if not batches and self._closed:
                return

    def _next(self, tick_at_s: float) -> list[NodeBatch]:
        """What waits, the oldest first, as much as is judged at once; nothing: it is time to tick, or over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, max(tick_at_s - time.monotonic(), 0))
            batches, taken = [], 0
            while self._waiting and taken < SAMPLES_AT_ONCE:
                batch, samples = self._waiting.popleft()
                self._waiting_samples -= samples
                taken += samples
                batches.append(batch)
            return batches

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            with self._observation.evaluate.round():
                work()
        except Exception as error:  # (one job's odd figures must not end the watch over the others)
            log.error("an evaluation failed", exc_info=error)

    def _resume(self) -> None:
        """As often as the database does not answer; whoever went on without what was would tell of it anew, and of its end never."""
        self.fleet.clear()
        self._tell(
            resume(
                self._repository,
                self.fleet,
                now_us=self._now_us(),
                retire_after_us=self._retire_after_us,
                began_us=self._began_us,
            )
        )
        self._resumed = True

    def _take(self, batches: Sequence[NodeBatch]) -> None:
        self._pass_over()
        began_s, behind = time.monotonic(), self.behind
        folded = self.fleet.folded
        self._tell(self.fleet.take(*batches, behind=behind))
        if behind:
            self._observation.dropped.labels("judgements", "evaluation_behind").inc(self.fleet.folded - folded)
            self._rest(3 * (time.monotonic() - began_s))

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _pass_over(self) -> None:
        with self._changed:
            passed_over, self._passed_over = self._passed_over, []
        if passed_over:
            self.fleet.pass_over(passed_over)

    def _tick(self) -> None:
        now_us = self._now_us()
        self._pass_over()
        with self._changed:
            refused = [self._refused.popleft() for _ in range(len(self._refused))]
            advised = [self._advised.popleft() for _ in range(len(self._advised))]
        for record in advised:
            if (words := alert_words(record.advice)) is not None:
                self.fleet.advise(record, words)
        for node, refusal in refused:
            self.fleet.refused(node, refusal.count, refusal.reason)
        last_seen_us = {state.hello.node: state.last_seen_us for state in self._nodes()}
        self._ask_for_silent_nodes(now_us, last_seen_us)
        self._tell(self.fleet.tick(now_us, last_seen_us))
        self._save_forecasts(now_us)
        self._save_alerts()

    def _ask_for_silent_nodes(self, now_us: int, last_seen_us: Mapping[str, int]) -> None:
        """What is silent here may speak to another collector on this database."""
        heard_us = {**self.fleet.heard_before, **last_seen_us}
        if 0 <= now_us - self._asked_us < ASK_EVERY_US or not any(
            now_us - us > SILENT_HERE_US for us in heard_us.values()
        ):
            return
        self._asked_us = now_us
        with self._storing():
            for record in pages(lambda cursor: self._repository.nodes(cursor=cursor, limit=PAGE)):
                if record.last_received_us > heard_us.get(record.node, record.last_received_us):
                    self.fleet.heard_elsewhere(record.node, record.last_received_us)

    def _tell(self, changes: Sequence[Change]) -> None:
        """Alerts are told and kept at once, and with them how far everybody was judged; other forecasts with the next tick."""
        if not changes:
            return
        now_us = self._now_us()
        self._publish([change.alert for change in changes])
        # Of two states the later is kept, though the clock was set back between them.
        self.fleet.changed_us = updated_us = max(now_us, self.fleet.changed_us)
        self._unsaved.extend(alert_record(change, updated_us=updated_us) for change in changes if not change.as_kept)
        self._save_alerts()
        self._save_forecasts(now_us)
        for change in changes:
            if change.retold or change.as_kept:
                continue
            condition = change.alert.condition
            severity = condition.rule.severity.value
            log.info(change.alert.state.value, alert=condition.rule.name, severity=severity, summary=condition.summary)

    def _save_alerts(self) -> None:
        """What the database does not take now it gets with the next tick."""
        with self._storing():
            if self._unsaved:
                self._repository.save_alerts(list(self._unsaved))
                self._unsaved.clear()

    def _save_forecasts(self, now_us: int) -> None:
        """What the database does not take is out of date by the next tick."""
        forecasts = self.fleet.forecasts()
        with self._storing():
            if forecasts:
                self._repository.save_forecasts(forecasts, made_us=now_us)
        self._foreseen.look(forecasts, self.fleet.watched, now_us)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._observation.evaluate.failed()
            log.warning("forecasts and alerts cannot be kept now", error=str(error))
