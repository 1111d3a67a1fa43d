"""What events came to, for people, within 80 columns but for sentences (see `prose`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allocscope.allocator.chronicle.events import Kind
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.chronicle.judgement import Finding, Subject, judge
from allocscope.allocator.chronicle.standing import Standing, class_bytes
from allocscope.allocator.chronicle.tally import AGAIN_WITHIN, Flow, Tally
from allocscope.cli.log_text import NO_SUCH_LINES, beginning_as_text, end_as_text
from allocscope.model.figures import percent, size

LARGEST_FLOWS = 8
STREAMS = 12
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_CAUSES = {
    Kind.FLUSH: ("flushes", Subject.FLUSHES),
    Kind.EMPTY_CACHE: ("empty_cache", Subject.EMPTY_CACHES),
    Kind.GARBAGE_COLLECTION: ("garbage collections", Subject.GARBAGE_COLLECTIONS),
    Kind.MADE_ROOM: ("room made", None),
    Kind.POOL_END: ("private pools' ends", None),
}


@dataclass(frozen=True, slots=True)
class Account:
    """What events of one device, or of a log, came to."""

    device: int | None
    tally: Tally
    history: DeviceHistory | None = None
    """None: of a log's lines, which tell less; `lines` of them."""
    standing: Standing | None = None
    lines: int | None = None


def as_text(account: Account) -> str:
    """The whole summary."""
    return "\n".join(_lines(account))


def _lines(account: Account) -> Iterator[str]:
    tally, history = account.tally, account.history
    peak = None if account.standing is None else account.standing.peak()
    findings = {finding.subject: finding for finding in judge(tally, peak)}
    if history is not None:
        yield from beginning_as_text(history)
        yield end_as_text(history)
    else:
        yield f"{account.lines:,} lines{_lasted(tally)}"
        if tally.allocations or tally.frees or tally.merges:
            yield NO_SUCH_LINES
    yield ""
    yield from _counts(tally, recorded=history is not None)
    yield from _said(findings, Subject.SPLITS_AND_MERGES)
    if history is not None:
        yield from _sources(tally, findings)
    yield from _classes(account)
    yield from _streams(tally, recorded=history is not None)
    if history is not None:
        yield from _waits(tally, findings)
        yield from _churn(tally, findings)
        yield from _causes(tally, findings)
    if peak is not None:
        yield from _said(findings, Subject.UNUSED, "unused")
    if tally.ooms or history is not None:
        yield f"\n{'OutOfMemoryErrors':<20} {tally.ooms:>11,}"
        yield from _said(findings, Subject.OOMS)
    if tally.retries:
        yield f"\n{'failed attempts':<20} {tally.retries:>11,}"
        yield from _said(findings, Subject.RETRIES)


def _lasted(tally: Tally) -> str:
    return "" if tally.duration_s is None else f", {tally.duration_s:,.3f} s"


def _said(findings: dict[Subject, Finding], subject: Subject, heading: str = "") -> Iterator[str]:
    finding = findings.get(subject)
    if finding is not None:
        if heading:
            yield f"\n{heading}"
        yield f"  {'normal' if finding.normal else 'NOT NORMAL'}: {finding.text}"


def _counts(tally: Tally, *, recorded: bool) -> Iterator[str]:
    counts = [
        ("allocations", tally.allocations),
        ("frees", tally.frees),
        ("splits", tally.splits),
        ("merges", tally.merges),
    ]
    for name, count in counts:
        if recorded or count or name != "splits":
            rate = tally.a_second(count)
            yield f"{name:<20} {count:>11,}{'' if rate is None else f'  {rate:>12,.1f} a second'}"


def _sources(tally: Tally, findings: dict[Subject, Finding]) -> Iterator[str]:
    total = tally.allocations
    if not total:
        return
    yield "\nallocations served by"
    for name, count in (
        ("the cache, as it was", tally.cached),
        ("splitting a block", tally.split_cached),
        ("the driver", tally.driver),
    ):
        yield f"{name:<20} {count:>11,}  {percent(count / total):>12}"
    yield from _said(findings, Subject.SOURCE)


def _classes(account: Account) -> Iterator[str]:
    tally, standing = account.tally, account.standing
    columns: dict[str, Sequence[int]] = {"allocations": tally.allocations_by_class, "frees": tally.frees_by_class}
    if account.history is not None:
        columns["splits"] = tally.splits_by_class
    columns["merges"] = tally.merges_by_class
    if standing is not None:
        columns["in use"], columns["at the peak"] = standing.now().blocks, standing.peak().blocks
    rows = [
        index for index in range(len(tally.allocations_by_class)) if any(column[index] for column in columns.values())
    ]
    if not rows:
        return
    yield f"\n{'up to':>8}" + "".join(f" {name:>11}" for name in columns)
    for index in rows:
        yield f"{_short(class_bytes(index)):>8}" + "".join(f" {column[index]:>11,}" for column in columns.values())


def _short(bytes_: int) -> str:
    """A power of two by its name, as `--size` takes it."""
    power = min((bytes_.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{bytes_ >> (10 * power)} {_UNITS[power]}"


def _streams(tally: Tally, *, recorded: bool) -> Iterator[str]:
    if not tally.streams:
        return
    yield f"\n{'stream':<20} {'allocations':>11} {'bytes':>14}{' frees that waited' if recorded else ''}"
    order = sorted(tally.streams.items(), key=lambda item: -item[1].allocations)
    for stream, use in order[:STREAMS]:
        waits = f" {use.waits:>17,}" if recorded else ""
        name = "not told" if stream is None else str(stream) if 0 <= stream < 1 << 16 else hex(stream)
        yield f"{name:<20} {use.allocations:>11,} {size(use.allocated_bytes):>14}{waits}"
    if len(order) > STREAMS:
        yield f"and {len(order) - STREAMS:,} more"


def _waits(tally: Tally, findings: dict[Subject, Finding]) -> Iterator[str]:
    if not tally.waits and not tally.waits_over:
        return
    yield f"\n{'frees that waited':<20} {tally.waits:>11,}"
    if tally.waits_over and tally.longest_wait_us is not None:
        mean = tally.waited_us / tally.waits_over
        yield f"{'they waited':<20} {mean / 1e3:>11,.3f} ms, the longest {tally.longest_wait_us / 1e3:,.3f} ms"
    yield from _said(findings, Subject.WAITS)


def _churn(tally: Tally, findings: dict[Subject, Finding]) -> Iterator[str]:
    flow = tally.flow
    if not flow.got and not flow.given_back:
        return
    yield f"\n{'driver':<14} {'got':>8} {'bytes':>11} {'given back':>10} {'bytes':>11} {'got again':>9} {'bytes':>11}"
    rows = [
        (_short(bytes_) if bytes_ & (bytes_ - 1) == 0 else size(bytes_), each)
        for bytes_, each in tally.segments.items()
    ]
    rows.sort(key=lambda row: -(row[1].got_bytes + row[1].given_back_bytes))
    if tally.pages.got or tally.pages.given_back:
        rows.insert(0, ("pages", tally.pages))
    for name, each in rows[:LARGEST_FLOWS]:
        yield _flow(name, each)
    if len(rows) > LARGEST_FLOWS:
        yield f"and {len(rows) - LARGEST_FLOWS:,} more sizes"
    if len(rows) > 1:
        yield _flow("all", flow)
    rate = tally.a_second(flow.got + flow.given_back)
    if rate is not None:
        yield f"{rate:,.2f} calls of the driver a second; got again: within {AGAIN_WITHIN:,} allocations"
    yield from _said(findings, Subject.CHURN)


def _flow(name: str, flow: Flow) -> str:
    return (
        f"{name:<14} {flow.got:>8,} {size(flow.got_bytes):>11} {flow.given_back:>10,} {size(flow.given_back_bytes):>11} "
        f"{flow.again:>9,} {size(flow.again_bytes):>11}"
    )


def _causes(tally: Tally, findings: dict[Subject, Finding]) -> Iterator[str]:
    for kind, (name, subject) in _CAUSES.items():
        releases = tally.of(kind)
        if not releases.count and kind is not Kind.FLUSH:
            continue
        unsure = f", {releases.unsure:,} of them not for sure" if releases.unsure else ""
        gave = f"  gave back {size(releases.given_back_bytes)}{unsure}" if releases.count else ""
        yield f"\n{name:<20} {releases.count:>11,}{gave}"
        if subject is not None:
            yield from _said(findings, subject)
