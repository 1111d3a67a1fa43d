"""Captures on their way to the daemon, as files: a note, whole in itself, and then the whole snapshot.

A note that has no folder to go to yet is kept, the newest only, until there is one.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from allocscope.model.blocks import BlockMap
from allocscope.model.captures import NOTE_SUFFIX, SNAPSHOT_SUFFIX, Capture, CaptureNote
from allocscope.probe import fork, host_memory
from allocscope.probe.allocators import Allocators
from allocscope.probe.capture_folder import CaptureFolder
from allocscope.probe.counters import allocations_ever
from allocscope.probe.log import log
from allocscope.probe.texts import LONGEST_PROBLEM, printable
from allocscope.probe.torch_blocks import TorchBlocks
from allocscope.probe.torch_cuda import TORCH_ERRORS, Backend, TorchCuda

PICKLE_PROTOCOL = 4
"""The newest that PyTorch's viewer reads (torch/utils/viz/MemoryViz.js); of its kinds are all values of ours, too."""
OURS = "allocscope"
"""The one key that is added to PyTorch's own."""
LARGEST_NOTE_BYTES = 2 << 20
"""A block map may be as large, of a job with very many pools; the note then goes without."""
ENTRIES_AN_ALLOCATION = 4
"""Of history, at most: alloc, free_requested, free_completed, and now and then a segment's."""
BYTES_AN_ENTRY = 1536
"""Of history, as Python's values with the pickle's memory of them."""
COPY_FACTOR = 4
"""An entry as Python's values takes at most so many times what torch itself holds of it."""


MapOf = Callable[[Sequence[Mapping[str, Any]]], "BlockMap | None"]


class NoSnapshot(Exception):  # noqa: N818 (it names what happened)
    """There is none, and why."""


class CaptureWriter:
    """Writes one process's captures; any thread may, one at a time. Nothing is raised."""

    def __init__(self, torch: TorchCuda, blocks: TorchBlocks, allocators: Allocators, folder: CaptureFolder) -> None:
        self._torch, self._blocks, self._allocators, self._folder = torch, blocks, allocators, folder
        self._waiting: tuple[str, bytes] | None = None
        """The newest note that there was no folder for."""

    @property
    def has_folder(self) -> bool:
        """Whether a daemon that takes captures is, or was, here."""
        return self._folder.exists

    def leave_note(self, note: CaptureNote) -> bool:
        """Whether the daemon's folder has it now."""
        name = note.capture.capture_id + NOTE_SUFFIX
        try:
            packed = _pack(note)
            if len(packed) > LARGEST_NOTE_BYTES:
                packed = _pack(replace(note, block_map=None))
            return self._leave(name, packed)
        except Exception as error:  # noqa: BLE001 (a generated module refuses an old protobuf by errors of many types)
            log.debug("allocscope: a capture's note cannot be written: %r", error)
            return False

    def leave_waiting_note(self) -> bool:
        """Try the one that had no folder; whether one still waits."""
        waiting = self._waiting
        if waiting is not None and self._folder.exists:
            self._waiting = None
            self._leave(*waiting)
        return self._waiting is not None

    def _leave(self, name: str, packed: bytes) -> bool:
        try:
            self._folder.leave(name, packed)
        except (FileNotFoundError, NotADirectoryError):
            self._waiting = (name, packed)
            log.debug("allocscope: %s is not there yet: a capture's note waits for it", self._folder.path)
            return False
        except OSError as error:
            log.info("allocscope: a capture cannot be left in %s: %s", self._folder.path, error)
            return False
        return True

    def leave_snapshot(
        self, note: CaptureNote, about: Mapping[str, Any], *, most_entries: float, map_of: MapOf | None = None
    ) -> bool:
        """The whole snapshot, with `about` it among ours, and the note anew with what is known then; whether it is there.

        Where it is not, the note says why.
        `most_entries`: of history, a device, at most; it comes along where the machine has the memory for it.
        `map_of` makes a block map of the snapshot's segments where the note has none.
        """
        try:
            return self._write_snapshot(note, about, most_entries, map_of)
        except Exception as error:  # noqa: BLE001 (a full disk, no memory, what cannot be pickled: never into the job)
            why = error if isinstance(error, NoSnapshot) else f"the snapshot could not be left for the daemon: {error}"
            log.info("allocscope: capture %s: %s", note.capture.capture_id, why)
            self.leave_note(
                replace(note, capture=replace(note.capture, problem=_joined(note.capture.problem, str(why))))
            )
            return False

    def _write_snapshot(
        self, note: CaptureNote, about: Mapping[str, Any], most_entries: float, map_of: MapOf | None
    ) -> bool:
        self._folder.check_free()
        capture = note.capture
        with self._folder.part(capture.capture_id + SNAPSHOT_SUFFIX) as part:
            snapshot, lacking = self._take_snapshot(most_entries)
            if note.block_map is None and map_of is not None:
                note = replace(note, block_map=map_of(snapshot["segments"]))
            problem = _joined(capture.problem, lacking)
            snapshot[OURS] = {**self._who(capture), **about, **({"problem": problem} if problem else {})}
            pickle.dump(snapshot, part, PICKLE_PROTOCOL)  # straight to the file: it may be large
            capture = replace(
                capture,
                snapshot_bytes=part.bytes,
                history_entries=_entries(snapshot),
                tensors="tensors" in about,
                problem=problem,
            )
            is_left = self.leave_note(replace(note, capture=capture))
            if is_left:
                part.keep()
            return is_left

    def _take_snapshot(self, most_entries: float) -> tuple[dict[str, Any], str | None]:
        """PyTorch's own, and what it lacks."""
        if self._torch.backend is not Backend.NATIVE:
            raise NoSnapshot(
                f"torch's allocator here is {self._torch.backend.value}, of which no snapshot can be taken"
            )
        lacking = None
        if not self._has_memory_for_history(most_entries):
            lacking = "its history is left out: the machine has too little memory free to copy it"
        snapshot = self._blocks.snapshot(with_traces=lacking is None)
        if snapshot is None:
            why = (
                "the process ended, or stopped its probe" if self._blocks.is_closed else "this torch makes no snapshot"
            )
            raise NoSnapshot(why + (f", and {lacking}" if lacking else ""))
        return snapshot, lacking

    def _has_memory_for_history(self, most_entries: float) -> bool:
        """Nothing tells how long a history is: three figures that are surely more than its copy, of which one must fit."""
        available, held = host_memory.available_bytes(), host_memory.anonymous_bytes()
        if available is None or not most_entries:
            return True
        entries = min(most_entries * len(self._allocators), ENTRIES_AN_ALLOCATION * self._allocations_ever())
        by_size = COPY_FACTOR * held if held is not None else math.inf
        return min(BYTES_AN_ENTRY * entries, by_size) < available / 2

    def _allocations_ever(self) -> int:
        try:
            return sum(allocations_ever(self._torch.stats(allocator.device.index)) for allocator in self._allocators)
        except TORCH_ERRORS:
            return 0

    def _who(self, capture: Capture) -> dict[str, Any]:
        """Who ran, and under which settings: in plain values, as PyTorch's viewer must be able to read the whole file."""
        process = _known(asdict(self._allocators.process))
        process["devices"] = [
            _known({**asdict(allocator.device), "memory_fraction": self._torch.memory_fraction(allocator.device.index)})
            for allocator in self._allocators
        ]
        return {
            "capture_id": capture.capture_id,
            "reason": capture.reason.value,
            "time_us": capture.time_us,
            "process": process,
        }


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _joined(problem: str | None, further: str | None) -> str | None:
    return "; ".join(each for each in (problem, further) if each) or None


def _entries(snapshot: Mapping[str, Any]) -> int:
    return sum(len(trace) for trace in snapshot.get("device_traces", ()))


@cache
def _words() -> Any:
    with fork.held_off():
        from allocscope.model import wire
    return wire


def _pack(note: CaptureNote) -> bytes:
    problem = note.capture.problem
    if problem is not None:  # it may hold an error's text, and that anything
        note = replace(note, capture=replace(note.capture, problem=printable(problem, LONGEST_PROBLEM)))
    return bytes(_words().note_to_wire(note).SerializeToString())
