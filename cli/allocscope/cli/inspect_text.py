"""A snapshot's diagnosis for people: in words, tables and bars as wide as the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from allocscope.allocator.diagnosis import (
    DeviceDiagnosis,
    Diagnosis,
    Failure,
    Hole,
    Moment,
    much_stranded,
    picture_of,
)
from allocscope.allocator.diagnosis.holes import largest_holes, site_of, sites, stranded_bytes, worst_segments
from allocscope.allocator.headroom import Way
from allocscope.allocator.snapshot import AWAITING, INACTIVE, Snapshot, SnapshotSegment
from allocscope.cli.capture_owner import whose
from allocscope.cli.figures import moment
from allocscope.cli.prose import fold
from allocscope.model import BlockGroup, Line
from allocscope.model.figures import percent, size

NARROWEST = 60
HOLES, PINS, SEGMENTS, SITES, GROUPS, FINDINGS, FAILURES = 5, 3, 10, 8, 12, 10, 5
_LABEL = 34
"""Columns before a segment's bar."""
_TOLD = {
    Line.REQUESTED: "live, as asked for",
    Line.ROUNDING: "live, beyond what was asked for",
    Line.AWAITING_FREE: "freed, waiting for another stream",
    Line.STRANDED: "free, in holes that cannot be given back",
    Line.RELEASABLE: "free, empty_cache would give it back",
    Line.PRIVATE: "free, kept by private pools",
}
_WAYS = {
    Way.CACHE: "from what is free inside",
    Way.DEVICE: "from the device",
    Way.AFTER_RELEASE: "from the device, after giving cached segments back",
    Way.NONE: "none at all",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How a terminal can be written to."""

    width: int = 80
    colour: bool = False
    ascii_only: bool = False
    prose_width: int | None = None
    """Where sentences are folded; None: nowhere."""

    @property
    def shades(self) -> str:
        """A cell of a bar that is free, little, half, mostly, wholly in use; one that mostly waits."""
        return ".:+x#~" if self.ascii_only else "·░▒▓█~"

    def paint(self, text: str, code: str) -> str:
        """In a colour, where there are colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def fold(self, text: str) -> str:
        return fold(text, self.prose_width)

    def heading(self, text: str) -> str:
        return self.paint(text, "1")


def as_text(diagnosis: Diagnosis, snapshot: Snapshot, look: Look, *, file: str = "FILE", now: bool = False) -> str:
    """All that is worth saying. At a failure its own moment is shown; with `now`, the snapshot's."""
    parts = [_device(device, snapshot, look, file, now=now) for device in _failed_first(diagnosis)]
    if not parts:
        parts = ["no device has memory in this snapshot, or a history"]
    if snapshot.capture is not None:
        parts.insert(0, look.fold(whose(snapshot.capture)))
    if _without_places(diagnosis, now=now):
        parts.append(look.fold(_HOW_TO_RECORD))
    if snapshot.host_segments:
        parts.append(
            f"pinned host memory: {size(sum(snapshot.host_segments))} in {len(snapshot.host_segments):,} segments"
        )
    if snapshot.conf:
        parts.append(f"settings: {_clean(snapshot.conf)}")
    if diagnosis.findings:
        lines = [look.fold(f"  {_clean(finding.text)}") for finding in diagnosis.findings[:FINDINGS]]
        parts.append(
            "\n".join([look.heading("what does not add up"), *lines, *_more(len(diagnosis.findings), FINDINGS)])
        )
    text = "\n\n".join(parts)
    if look.ascii_only:
        text = text.translate({ord("←"): "<-", ord("×"): "x", ord("…"): "..."}).encode("ascii", "replace").decode()
    return text


def _failed_first(diagnosis: Diagnosis) -> Sequence[DeviceDiagnosis]:
    return sorted(diagnosis.devices, key=lambda device: not device.failures)


_HOW_TO_RECORD = (
    "Where blocks were asked for is not recorded; torch.cuda.memory._record_memory_history(), called before the job "
    "allocates, records it."
)


def _without_places(diagnosis: Diagnosis, *, now: bool) -> bool:
    """Is a block among those shown of which nobody knows where it was asked for?"""
    return any(
        site_of(pin.stack) is None
        for device in diagnosis.devices
        for hole in largest_holes((device.now if now else device.focus).segments, HOLES)
        for pin in hole.pins[:PINS]
    )


def _device(device: DeviceDiagnosis, snapshot: Snapshot, look: Look, file: str, *, now: bool) -> str:
    moment = device.now if now else device.focus
    sections = [
        look.fold(_title(device, look)),
        look.fold(_failures(device, snapshot, look)),
        "" if any(failure.moment is moment for failure in device.failures) else _picture(device, snapshot, look, file),
        _bill(moment, look, "where the bytes are" + ("" if moment is device.now else ", at that moment")),
        _groups(moment.groups, look),
        _bars(moment.segments, look),
        _holes(moment.segments, look),
        _sites(moment, look),
        look.fold(_headroom(device, look, since_failure=moment is not device.now)),
    ]
    return "\n\n".join(section for section in sections if section)


def _title(device: DeviceDiagnosis, look: Look) -> str:
    now = device.now
    return (
        look.heading(f"device {device.device}")
        + f"  {size(now.reserved_bytes)} reserved in {len(now.segments):,} segments, {now.block_count:,} blocks, "
        + f"{size(now.allocated_bytes)} live"
    )


def _failures(device: DeviceDiagnosis, snapshot: Snapshot, look: Look) -> str:
    lines: list[str] = []
    for failure in device.failures[-FAILURES:]:
        lines += _failure(failure, device.device, snapshot, look)
    earlier = len(device.failures) - FAILURES
    if earlier > 0:
        lines.insert(0, f"{earlier} earlier OutOfMemoryErrors are left out (see --json)")
    if lines and device.focus is not device.now:
        lost = device.focus.allocated_bytes - device.now.allocated_bytes
        lines.append(
            f"What follows shows the moment of the last one; since then {_change(lost)}. --now shows the snapshot."
        )
    return "\n".join(lines)


def _failure(failure: Failure, device: int, snapshot: Snapshot, look: Look) -> Iterator[str]:
    entry = failure.entry
    when = f" at {moment(entry.time_us)} UTC" if entry.time_us else ""
    wanted = f"a segment of {size(failure.segment_bytes)} wanted of the device"
    if failure.entry_index is not None:
        when += f" (entry {failure.entry_index:,} of {len(snapshot.traces[device]):,})"
        wanted = f"{size(entry.size)} asked for, {wanted}"
    told = f"OutOfMemoryError{when}: {wanted}"
    yield f"{look.paint(told, '31;1')}: {failure.verdict.value.replace('_', ' ')}"
    if where := site_of(entry.stack):
        yield f"  by {_clean(where)}"
    yield from (f"  {_clean(reason)}" for reason in failure.why)


def _change(lost: int) -> str:
    if not lost:
        return "as much was freed as allocated"
    return f"{size(lost)} net of it was freed" if lost > 0 else f"{size(-lost)} more was allocated"


def _picture(device: DeviceDiagnosis, snapshot: Snapshot, look: Look, file: str) -> str:
    """What it comes to, and what can be tried without the job: only where there is a history to replay."""
    lines = [look.fold(sentence) for sentence in picture_of(device.now)]
    history = snapshot.traces[device.device : device.device + 1]
    if any(history) and much_stranded(device.now) and not snapshot.settings.expandable:
        lines.append("To see what another setting makes of it:")
        lines.append(
            f"  allocscope replay {shlex.quote(_clean(file))} --conf expandable_segments:True"
        )  # whole, to be copied
    return "\n".join(lines)


def _bill(moment: Moment, look: Look, heading: str) -> str:
    total = moment.reserved_bytes
    if not total:
        return "nothing is reserved"
    room = max(look.width - 71, 10)
    lines = [look.heading(heading)]
    for entry in moment.lines:
        share = entry.bytes / total
        filled = look.shades[4] * round(share * room)
        bar = look.paint(filled, "31") if entry.line is Line.STRANDED else filled
        amount = size(entry.bytes) if entry.exact else "not known"
        if not entry.exact and entry.line is Line.REQUESTED:
            amount = f"≤ {size(entry.bytes)}" if not look.ascii_only else f"<= {size(entry.bytes)}"
        lines.append(
            f"  {entry.line.value:<13} {amount:>13} {percent(share):>7}  {bar}{' ' * (room - len(filled))} {_TOLD[entry.line]}"
        )
    lines.append(f"  {'reserved':<13} {size(total):>13}")
    return "\n".join(line.rstrip() for line in lines)


def _groups(groups: Sequence[BlockGroup], look: Look) -> str:
    if not groups:
        return ""
    ordered = sorted(groups, key=lambda group: -group.reserved_bytes)
    rows = [_COLUMNS, *map(_row, ordered[:GROUPS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines = [f"  {line}" for line in table]
    return "\n".join([look.heading("by pool and stream"), *lines, *_more(len(groups), GROUPS)])


_COLUMNS: tuple[str, ...] = (
    "pool", "stream", "private", "segments", "reserved", "live", "waiting", "stranded", "releasable", "largest free"
)  # fmt: skip


def _row(group: BlockGroup) -> tuple[str, ...]:
    private = "" if group.private_pool is None else f"{group.private_pool.first},{group.private_pool.second}"
    return (
        f"{group.pool.value}{' expandable' if group.expandable else ''}",
        _stream(group.stream),
        private,
        str(group.segment_count),
        size(group.reserved_bytes),
        size(group.allocated_bytes),
        size(group.awaiting_free_bytes),
        size(group.stranded_bytes) if group.private_pool is None else "",
        size(group.releasable_bytes) if group.private_pool is None else f"({size(group.private_bytes)})",
        size(group.largest_free_block_bytes or 0),
    )


def _stream(stream: int) -> str:
    return str(stream) if stream < 1 << 16 else f"{stream:#x}"


def _bars(segments: Sequence[SnapshotSegment], look: Look) -> str:
    worst = worst_segments(segments, SEGMENTS)
    if not worst:
        return ""
    free, little, half, mostly, whole, waits = tuple(look.shades)
    legend = f"{whole} live  {mostly}{half}{little} partly  {free} free  {waits} waiting"
    holed = sum(1 for segment in segments if stranded_bytes(segment))
    heading = f"the worst of {holed} segments with holes ({legend})"
    return "\n".join([look.heading(heading), *(_bar_line(segment, look) for segment in worst)])


def _bar_line(segment: SnapshotSegment, look: Look) -> str:
    label = f"  {size(segment.total_size):>10} {segment.segment_type:<5} {size(stranded_bytes(segment)):>10} free "
    room = max(look.width - _LABEL, 20)
    cells = bar_of(segment, room, look.shades)
    return label + (look.paint(cells, "36") if look.colour else cells)


def bar_of(segment: SnapshotSegment, cells: int, shades: str) -> str:
    """A segment as a bar of so many cells; a cell that is not wholly in use never looks like one that is."""
    used, waiting = _used_by_cell(segment, cells)
    width = segment.total_size / cells
    return "".join(_shade(used[i] / width, waiting[i] / width, shades) for i in range(cells))


def _used_by_cell(segment: SnapshotSegment, cells: int) -> tuple[list[float], list[float]]:
    used, waiting = [0.0] * cells, [0.0] * cells
    width = segment.total_size / cells
    at = 0
    for block in segment.blocks:
        if block.state != INACTIVE:
            _spread(used, at / width, (at + block.size) / width, width)
            if block.state == AWAITING:
                _spread(waiting, at / width, (at + block.size) / width, width)
        at += block.size
    return used, waiting


def _spread(cells: list[float], start: float, stop: float, width: float) -> None:
    """Add a stretch, given in cells, to the cells that it touches."""
    for index in range(int(start), min(int(stop) + 1, len(cells))):
        cells[index] += max(min(stop, index + 1) - max(start, index), 0.0) * width


def _shade(used: float, waiting: float, shades: str) -> str:
    if waiting > 0.5:
        return shades[5]
    if used >= 1 - 1e-9:
        return shades[4]
    if used <= 1e-9:
        return shades[0]
    return shades[1 + min(int(used * 3), 2)]


def _holes(segments: Sequence[SnapshotSegment], look: Look) -> str:
    lines = [line for hole in largest_holes(segments, HOLES) for line in map(look.fold, _hole(hole))]
    return "\n".join([look.heading("the largest holes, and what pins them"), *lines]) if lines else ""


def _hole(hole: Hole) -> Iterator[str]:
    segment = hole.segment
    place = f"{segment.segment_type} pool, stream {_stream(segment.stream)}"
    what = "mapped range" if segment.is_expandable else "segment"
    pins = f"{len(hole.pins):,} block{'s' if len(hole.pins) != 1 else ''} of {size(hole.pinned_by_bytes)}"
    beside = " beside it" if segment.is_expandable else ""
    yield f"  {size(hole.size)} at {hole.address:#x} in a {what} of {size(segment.total_size)} ({place}), pinned by {pins}{beside}"
    for pin in hole.pins[:PINS]:
        state = " (waits for another stream)" if pin.state != "active_allocated" else ""
        yield f"    {size(pin.size):>12}{state}  {_clean(site_of(pin.stack) or '')}".rstrip()
    if len(hole.pins) > PINS:
        yield f"    {'…':>12}  {len(hole.pins) - PINS:,} more, larger"


def _sites(moment: Moment, look: Look) -> str:
    found = sites(moment.segments, SITES)
    if not found:
        return ""
    lines = [f"  {size(site.bytes):>12} {site.count:>6,} ×  {_clean(site.where)}" for site in found]
    return "\n".join([look.heading("who holds the live bytes"), *lines])


def _headroom(device: DeviceDiagnosis, look: Look, *, since_failure: bool) -> str:
    room = device.headroom
    if device.device_free_bytes is None:
        given = "  what the device itself has free is not known (--device-free): so much the allocator has by itself"
    else:
        given = f"  with {size(device.device_free_bytes)} free on the device"
    what = "none" if room.way is Way.NONE else f"{size(room.request_bytes)}, {_WAYS[room.way]}"
    when = "at the snapshot, with what was freed since the OutOfMemoryError" if since_failure else "now"
    return f"{look.heading(f'the largest request that would succeed {when}')}: {what}\n{given}"


def _more(count: int, shown: int) -> Iterable[str]:
    return (f"  and {count - shown:,} more",) if count > shown else ()


def _clean(text: str) -> str:
    """Without what could steer a terminal: names of frames are whatever a file says."""
    return "".join(c if c.isprintable() else "?" for c in text)
