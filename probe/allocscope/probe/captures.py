"""Which captures are taken, and when: at out-of-memory errors, bounded, and as ordered, with a history recorded first."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from allocscope.model.blocks import BlockMap
from allocscope.model.captures import Capture, CaptureNote, CaptureReason
from allocscope.model.events import Event
from allocscope.model.orders import CaptureOrder
from allocscope.model.sample import Sample, chunks
from allocscope.probe.allocators import Allocator, Allocators
from allocscope.probe.allowance import Allowance
from allocscope.probe.capture_writer import CaptureWriter, MapOf
from allocscope.probe.clock import Clock
from allocscope.probe.history import History

OOM_NOTES, OOM_NOTE_EVERY_S = 16, 60.0
"""A note is small and written at once. The error itself is always told on the stream, too."""
OOM_SNAPSHOTS, OOM_SNAPSHOT_EVERY_S = 3, 900.0
"""A whole snapshot may be some 100 MB: a program that catches its errors leaves some of the first, then a few an hour."""
CHEAP_S, COST_FACTOR = 0.5, 100
"""After a snapshot that took longer, a program that catches its errors spends at most 1 % of its time on them."""
ORDERED_COST_FACTOR, LONGEST_DELAY_S = 20, 30.0
"""An ordered capture waits until 20 times the cost of the one before has passed, but never longer than people would."""
NOTE_RETRY_S = 1.0
HISTORY_ENTRIES, MOST_HISTORY_ENTRIES = 200_000, 1_000_000
"""A device; each is some 200 bytes while it is recorded, and some 100 in the file."""
LONGEST_HISTORY_S = 600.0
TENSORS_LIMIT_S = 10.0
MOST_WAITING, MOST_REMEMBERED = 16, 1024
ENDED = "the process ended, or stopped its probe,"


@dataclass(frozen=True, slots=True)
class Moment:
    """What was told of an OutOfMemoryError just now, before it is raised; None: it could not be read, or was moments before."""

    allocator: Allocator
    sample: Sample | None
    block_map: BlockMap | None
    event: Event
    map_of: MapOf | None = None
    """Hands on a block map, made of these segments, where there is none yet."""


@dataclass(frozen=True, slots=True)
class _Ordered:
    order: CaptureOrder
    due_s: float
    lacking: str | None
    """Why it has no history."""


class Captures:
    """One process's. `on_oom` is called by whichever thread runs out of memory, the rest by the probe's own."""

    def __init__(
        self,
        allocators: Allocators,
        writer: CaptureWriter,
        history: History,
        clock: Clock,
        tell_tensors: Callable[[float], Any] | None = None,
    ) -> None:
        """`tell_tensors` says, within a number of seconds, who holds the live tensors, in plain values."""
        self._allocators, self._writer, self._history, self._clock = allocators, writer, history, clock
        self._tell_tensors = tell_tensors or _tell_tensors
        self._taking = threading.Lock()
        self._notes = Allowance(OOM_NOTES, OOM_NOTE_EVERY_S)
        self._snapshots = Allowance(OOM_SNAPSHOTS, OOM_SNAPSHOT_EVERY_S)
        self._next_at_oom_s = self._next_ordered_s = -math.inf
        self._was_left = True
        """The last snapshot of an error."""
        self._waiting: list[_Ordered] = []
        self._at_work: _Ordered | None = None
        """The one that is being taken."""
        self._remembered: deque[str] = deque(maxlen=MOST_REMEMBERED)
        self._has_note_waiting = False

    # at an OutOfMemoryError

    def on_oom(self, moment: Moment) -> None:
        """The note first, whatever then becomes of the process; then the snapshot, if it is time for one."""
        now_s = self._clock.seconds()
        if not self._notes.take(now_s):
            return
        if not self._taking.acquire(blocking=False):
            self._leave_note(_note_of(moment, self._allocators, "another capture was being taken just then"))
            return
        try:
            problem = self._why_no_snapshot(now_s)
            note = _note_of(moment, self._allocators, problem)
            is_left = self._leave_note(note)
            if problem is None:
                about = {"oom": _plain(moment)}
                is_left = is_left and self._writer.leave_snapshot(
                    note, about, most_entries=self._history.most_entries, map_of=moment.map_of
                )
                self._account_for_snapshot(now_s, is_left=is_left)
        finally:
            self._taking.release()

    def _account_for_snapshot(self, began_s: float, *, is_left: bool) -> None:
        """One that could not be left, as on a full disk, is tried again at a later error, and may cost no more than others."""
        cost_s = self._clock.seconds() - began_s
        self._next_at_oom_s = began_s + (cost_s * (1 + COST_FACTOR) if cost_s > CHEAP_S or not is_left else 0)
        self._was_left = is_left
        if not is_left:
            self._snapshots.give_back()

    def _why_no_snapshot(self, now_s: float) -> str | None:
        if not self._writer.has_folder:
            return "no daemon was there to leave a snapshot with"
        if now_s < self._next_at_oom_s or not self._snapshots.take(now_s):
            return f"a whole snapshot was {'taken' if self._was_left else 'tried'} not long before"
        return None

    def _leave_note(self, note: CaptureNote) -> bool:
        is_left = self._writer.leave_note(note)
        self._has_note_waiting |= not is_left
        return is_left

    # as ordered

    def order(self, order: CaptureOrder) -> None:
        """Take it when it is due; each is answered once, if only with why it cannot be."""
        if order.capture_id in self._remembered:
            return
        self._remembered.append(order.capture_id)
        problem = self._refusal(order)
        if problem is not None:
            self._leave_note(self._note(order, problem))
            return
        history_s = min((order.history_us or 0) / 1e6, LONGEST_HISTORY_S)
        lacking = self._history.begin(_entries(order)) if history_s else None
        due_s = self._clock.seconds() + (0 if lacking else history_s)
        self._waiting.append(_Ordered(order, due_s, lacking))

    def step(self) -> float:
        """Take one that is due; when the next is, by the clock's seconds."""
        if self._has_note_waiting:
            self._has_note_waiting = self._writer.leave_waiting_note()
        ordered = min(self._waiting, key=lambda each: each.due_s, default=None)
        if ordered is not None and self._clock.seconds() >= self._due_s(ordered):
            self._waiting.remove(ordered)
            self._at_work = ordered
            try:
                self._take(ordered)
            finally:
                self._at_work = None
        due_s = min(map(self._due_s, self._waiting), default=math.inf)
        return min(due_s, self._clock.seconds() + NOTE_RETRY_S) if self._has_note_waiting else due_s

    def close(self, orders: Iterable[CaptureOrder] = ()) -> None:
        """Answer those that wait, these that nobody looked at yet, and one that is being taken, which the end may overtake.

        Give back a history that was switched on.
        """
        waiting, self._waiting = [each.order for each in self._waiting], []
        waiting += (order for order in orders if order.capture_id not in self._remembered)
        for order in waiting:
            self._leave_note(self._note(order, f"{ENDED} before it was due"))
        at_work = self._at_work
        if at_work is not None:
            self._leave_note(self._note(at_work.order, f"{ENDED} while it was taken"))
        self._history.end()

    def _due_s(self, ordered: _Ordered) -> float:
        return max(ordered.due_s, min(self._next_ordered_s, ordered.due_s + LONGEST_DELAY_S))

    def _refusal(self, order: CaptureOrder) -> str | None:
        devices = {allocator.ref.device_uuid for allocator in self._allocators}
        if order.device_uuid is not None and order.device_uuid not in devices:
            return f"the process does not use device {order.device_uuid} by torch; it uses {', '.join(sorted(devices)) or 'none'}"
        if len(self._waiting) >= MOST_WAITING:
            return f"{MOST_WAITING} captures of this process are waiting already; ask again when they are done"
        return None

    def _take(self, ordered: _Ordered) -> None:
        began_s = self._clock.seconds()
        about: dict[str, Any] = {}
        problems = [ordered.lacking, self._history.interference if ordered.order.history_us else None]
        if ordered.order.tensors:
            try:
                about["tensors"] = self._tell_tensors(TENSORS_LIMIT_S)
            except Exception as error:  # noqa: BLE001 (the snapshot is worth having without)
                problems.append(f"who holds the tensors could not be told: {error!r}")
        problem = "; ".join(each for each in problems if each) or None
        with self._taking:  # and no longer: an error may end the job meanwhile
            note = self._note(ordered.order, problem)
            self._writer.leave_snapshot(note, about, most_entries=self._history.most_entries)
        if not any(each.order.history_us for each in self._waiting):
            self._history.end()
        ended_s = self._clock.seconds()
        self._next_ordered_s = ended_s + ORDERED_COST_FACTOR * (ended_s - began_s)

    def _note(self, order: CaptureOrder, problem: str | None) -> CaptureNote:
        process = self._allocators.process
        capture = Capture(
            order.capture_id,
            process.process_id,
            self._clock.wall_us(),
            order.reason,
            device_uuid=order.device_uuid,
            problem=problem,
        )
        return CaptureNote(capture, process)


def _entries(order: CaptureOrder) -> int:
    return min(max(order.history_entries or HISTORY_ENTRIES, 1), MOST_HISTORY_ENTRIES)


def _note_of(moment: Moment, allocators: Allocators, problem: str | None) -> CaptureNote:
    process, ref = allocators.process, moment.allocator.ref
    capture = Capture(
        os.urandom(16).hex(),
        process.process_id,
        moment.event.time_us,
        CaptureReason.OOM,
        device_uuid=ref.device_uuid,
        problem=problem,
    )
    samples = None if moment.sample is None else next(chunks(ref, [moment.sample]))
    return CaptureNote(capture, process, samples, moment.block_map, moment.event)


def _plain(moment: Moment) -> dict[str, int | str | None]:
    """The figures of the error's message, by the names of an Event."""
    event = moment.event
    return {
        "device": moment.allocator.device.index,
        "device_uuid": event.device_uuid,
        "requested_bytes": event.requested_bytes,
        "device_total_bytes": event.device_total_bytes,
        "device_free_bytes": event.device_free_bytes,
    }


def _tell_tensors(time_limit_s: float) -> Any:
    tensors = import_module("allocscope.probe.tensors").tensors  # only where somebody asks
    return tensors(time_limit_s=time_limit_s, rest_s=0.001).to_plain()  # the job goes on meanwhile
