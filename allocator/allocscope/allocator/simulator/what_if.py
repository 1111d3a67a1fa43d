"""What the requests of a recorded history come to under other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from allocscope.allocator.conf import agree, conf_in_force, text_of
from allocscope.allocator.errors import SettingsError
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.allocator.simulator.asked import OtherUsed, other_use, pack
from allocscope.allocator.simulator.beginning import reserved_in_the_end
from allocscope.allocator.simulator.exactness import Exactness, recorded_of
from allocscope.allocator.simulator.history import History, Outcome, read_history
from allocscope.allocator.simulator.rules import is_verified
from allocscope.allocator.simulator.script import Script
from allocscope.allocator.simulator.seed import as_told
from allocscope.allocator.snapshot import SnapshotSegment, TraceEntry

UNKNOWN_TOTAL_BYTES = 1 << 40
"""What a device of unknown size is taken to have: enough for anything."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of one device's allocator; bytes."""

    trace: Sequence[TraceEntry]
    segments: Sequence[SnapshotSegment]
    """After the last entry."""
    settings: AllocatorSettings
    """In force."""
    conf: str
    """As it was told: PYTORCH_CUDA_ALLOC_CONF."""
    device_total_bytes: int | None = None
    """None: what an OutOfMemoryError in the history shows to have been there, or enough for anything."""
    other_used: OtherUsed | int = 0
    """In use on the device and not this allocator's."""
    memory_fraction: float | None = None
    """What set_per_process_memory_fraction was called with; None: not known, and so the settings' own."""
    version: str | None = None
    """Of PyTorch; None: not known."""

    @property
    def told_in_force(self) -> dict[str, str]:
        """The keys that are set, and their values, as they are in force."""
        try:
            return conf_in_force(self.conf, self.settings)
        except SettingsError:
            return conf_in_force("", self.settings)

    @property
    def conf_in_force(self) -> str:
        """The same as a PYTORCH_CUDA_ALLOC_CONF: the one that was told, where nothing changed it at run time."""
        try:
            if agree(parse_settings(self.conf), self.settings):
                return self.conf
        except SettingsError:
            pass
        return text_of(self.told_in_force)

    @property
    def allowed_bytes(self) -> int | None:
        """What a memory fraction that the program set lets the allocator reserve; None: no such limit, or not known."""
        fraction, total = self.memory_fraction, self.device_total_bytes
        return int(fraction * total) if fraction is not None and fraction < 1 and total else None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What the same requests come to."""

    history: History
    device_total_bytes: int | None
    """None: not known, and so nothing could fail."""
    total_is_shown: bool
    """Whether that size is not told, but what the last OutOfMemoryError of the history shows this allocator to have had."""
    recorded_peak_bytes: int
    """What was reserved at most while the history was recorded."""
    outcomes: tuple[tuple[str, Outcome], ...]
    """By settings, as they were recorded first."""
    exactness: Exactness
    """How well the first of these does what really happened; the others are estimates where it is not exact."""


Replay = Callable[[Script, Sequence[str]], Sequence[Outcome]]
"""Makes a script's requests under each of these settings; the outcomes in their order."""


def one_by_one(script: Script, confs: Sequence[str]) -> Sequence[Outcome]:
    """One after the other, here."""
    return [script.replay(conf) for conf in confs]


def what_if(source: Source, confs: Iterable[str], *, version: str | None = None, replay: Replay = one_by_one) -> WhatIf:
    """Replay a history under its own settings and each of these, each of which is made once; sizes are bytes.

    Requests after one that fails are not made, unless the program is known to have gone on. Each is as it was recorded: a program
    that would have asked otherwise under other settings (benchmarking of kernels by free memory, a cache sized by it) is not foreseen.

    PyTorch 2.11 to 2.14, others by the nearest rules; `exactness` says how well they do what was recorded. SettingsError: one of
    `confs` cannot be read; ValueError: `version` is none.
    """
    tried = different(source.conf_in_force, confs)
    history, script = script_of(source, version=version)
    return weigh(source, history, script, list(zip(tried, replay(script, tried), strict=True)), version=version)


def weigh(
    source: Source,
    history: History,
    script: Script,
    outcomes: Sequence[tuple[str, Outcome]],
    *,
    version: str | None = None,
) -> WhatIf:
    """What replays of a source's script came to, the one under the recorded settings first. ValueError: `version` is none."""
    told = version or source.version
    recorded = recorded_of(history, source.trace, source.segments)
    return WhatIf(
        history=history,
        device_total_bytes=None if script.device_total_bytes == UNKNOWN_TOTAL_BYTES else script.device_total_bytes,
        total_is_shown=not source.device_total_bytes and script.device_total_bytes != UNKNOWN_TOTAL_BYTES,
        recorded_peak_bytes=recorded.reserved_peak_bytes,
        outcomes=tuple(outcomes),
        exactness=Exactness(history, recorded, outcomes[0][1], rules_known=told is None or is_verified(told)),
    )


def different(recorded: str, confs: Iterable[str]) -> list[str]:
    """Those that are not the same settings under another spelling, as they were recorded first."""
    found = {parse_settings(recorded): recorded}
    for conf in confs:
        found.setdefault(parse_settings(conf), conf)
    return list(found.values())


def script_of(source: Source, *, version: str | None = None, history: History | None = None) -> tuple[History, Script]:
    """A history read, where it is not yet, and its requests made ready.

    `version` is PyTorch's, where the source does not know it. ValueError: it is none.
    """
    total = source.device_total_bytes or shown_total(source.trace, source.segments) or UNKNOWN_TOTAL_BYTES
    fraction = source.memory_fraction
    other = source.other_used if callable(source.other_used) else _always(source.other_used)
    # a device that is said to be smaller than what was reserved on it is another one than the history's
    read_on = total if total >= _most_reserved(source) else shown_total(source.trace, source.segments)
    history = history or read_history(
        source.trace,
        source.settings,
        device_total_bytes=read_on or UNKNOWN_TOTAL_BYTES,
        other_used=other,
        allowed_bytes=int(fraction * total) if fraction is not None and fraction < 1 else None,
        version=version or source.version,
        segments=[as_told(segment) for segment in source.segments],
    )
    return history, Script(
        asked=pack(history.asked),
        version=history.version,
        device_total_bytes=total,
        other_used=other_use(history.asked, other),
        memory_fraction=fraction,
    )


def _most_reserved(source: Source) -> int:
    return max(_reserved(source.trace, source.segments))


def shown_total(trace: Sequence[TraceEntry], segments: Sequence[SnapshotSegment]) -> int | None:
    """What an allocator and the device's free memory came to when a request failed, at the last such moment; None: none did.

    Bytes; others' use is not in it. Any version of PyTorch whose entries of failures tell device_free. Raises nothing.
    """
    return next((had for _, had in _shown(trace, segments)), None)


def shown_other(trace: Sequence[TraceEntry], segments: Sequence[SnapshotSegment], device_total_bytes: int) -> OtherUsed:
    """What others used when requests failed, each from the one before on, the last for good; nothing where none failed. Bytes."""
    shown = [(time_us, max(device_total_bytes - had, 0)) for time_us, had in _shown(trace, segments)][::-1]

    def used(time_us: int) -> int:
        return next((other for until_us, other in shown if time_us <= until_us), shown[-1][1] if shown else 0)

    return used


def _shown(trace: Sequence[TraceEntry], segments: Sequence[SnapshotSegment]) -> Iterator[tuple[int, int]]:
    """When requests failed, the last one first, and what the allocator and the device's free memory came to then."""
    for entry, reserved in zip(reversed(trace), _reserved(trace, segments), strict=False):
        free: int | None = entry.device_free
        if entry.action == "oom" and free is not None:
            yield entry.time_us, reserved + free


def _reserved(trace: Sequence[TraceEntry], segments: Sequence[SnapshotSegment]) -> Iterator[int]:
    """After each entry, the last one first; before the first, in the end."""
    reserved = reserved_in_the_end(trace, segments)
    yield reserved
    for entry in reversed(trace):
        if entry.action in ("segment_alloc", "segment_map"):
            reserved -= entry.size
        elif entry.action in ("segment_free", "segment_unmap"):
            reserved += entry.size
        yield reserved


def _always(other_bytes: int) -> OtherUsed:
    return lambda _: other_bytes
