"""`allocscope oom`: what the out-of-memory texts of a log say, and what they prove."""

from __future__ import annotations

import argparse
import codecs
import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from allocscope.allocator.messages import Figure, Judgement, OomMessage, OomReport, Origin, amount, judge, read_log

HELP = "explain the out-of-memory texts in a log"

_CHUNK_BYTES = 1 << 20


def main(arguments: list[str]) -> int:
    """Exit status: 0 whether or not a text is found, 1 where the log cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        report = _report(options.file)
    except (OSError, EOFError) as error:
        print(
            f"allocscope oom: cannot read {options.file}: {getattr(error, 'strerror', None) or error}", file=sys.stderr
        )
        return 1
    print(json.dumps(as_json(report)) if options.json else as_text(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="allocscope oom", description=HELP, allow_abbrev=False)
    parser.add_argument(
        "file", metavar="FILE", help="a log of any size, .gz too; - reads the standard input, packed or not"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def _report(file: str) -> OomReport:
    if file == "-":
        return _read(cast(io.BufferedReader, sys.stdin.buffer))
    with Path(file).open("rb") as log:
        return _read(log)


def _read(log: io.BufferedReader) -> OomReport:
    """Packed or plain; it may be a pipe, which cannot go back."""
    if log.peek(2).startswith(b"\x1f\x8b"):
        with gzip.open(log) as unpacked:
            return read_log(_text(unpacked))
    return read_log(_text(log))


def _text(log: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    """The log's text by chunks; UTF-8, or UTF-16 where its first bytes say so (a PowerShell redirection)."""
    chunk = log.read(_CHUNK_BYTES)
    wide = chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")("replace")
    while chunk:
        yield decoder.decode(chunk)
        chunk = log.read(_CHUNK_BYTES)
    yield decoder.decode(b"", final=True)


def as_json(report: OomReport) -> dict[str, Any]:
    """The object that --json prints: bytes, null for what is not known."""
    return {
        "messages": [_message_json(message, judge(message)) for message in report.messages],
        "retries": report.retries,
        "lines": report.lines,
        "left_out": report.left_out,
    }


def _message_json(message: OomMessage, judgement: Judgement) -> dict[str, object]:
    return {
        "is_oom": message.is_oom,
        "requested_bytes": _bytes(message.requested),
        "device": message.device,
        "total_bytes": _bytes(message.total),
        "free_bytes": _bytes(message.free),
        "allowed_bytes": _bytes(message.allowed),
        "this_process_bytes": _bytes(message.this_process),
        "other_processes": [{"pid": p.pid, "used_bytes": _bytes(p.used)} for p in message.other_processes],
        "allocated_bytes": _bytes(message.allocated),
        "reserved_bytes": _bytes(message.reserved),
        "unallocated_bytes": _bytes(message.unallocated),
        "private_pools_bytes": _bytes(message.private_pools),
        "cached_bytes": _bytes(message.cached),
        "active_bytes": _bytes(message.active),
        "other_bytes": _bytes(message.other),
        "limit_bytes": _bytes(message.limit),
        "verdict": judgement.verdict.value,
        "why": "; ".join(judgement.reasons),
        "try": list(judgement.advice),
        "own_pid": judgement.own_pid,
        "origin": message.origin.value,
        "kind": message.kind,
        "rank": message.rank,
        "worker": message.worker,
        "line": message.line,
        "times": message.times,
    }


def as_text(report: OomReport) -> str:
    """The report for people."""
    told = [_told(message, judge(message)) for message in report.messages]
    return "\n\n".join([_summary(report), *told])


def _summary(report: OomReport) -> str:
    ooms = [message for message in report.messages if message.is_oom]
    if not report.messages:
        return f"no out-of-memory text in {_many(report.lines, 'line')}"
    parts = [f"{_many(len(ooms), 'out-of-memory text')} in {_many(report.lines, 'line')}"]
    repeated = sum(message.times for message in ooms) - len(ooms)
    if repeated:
        parts.append(f"{_many(repeated, 'repetition')} of them")
    if report.retries:
        parts.append(f"{_many(report.retries, 'failed attempt')} that PyTorch made again")
    if report.left_out:
        parts.append(f"{_many(report.left_out, 'more text')} left out")
    return ", ".join(parts)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


_FIGURES = (
    ("requested", "asked for"),
    ("total", "device"),
    ("free", "free on the device"),
    ("allowed", "allowed"),
    ("limit", "limit"),
    ("this_process", "this process"),
    ("allocated", "allocated"),
    ("reserved", "reserved"),
    ("unallocated", "free in holes"),
    ("cached", "free in holes"),
    ("private_pools", "free in private pools"),
    ("active", "active"),
    ("other", "other allocations"),
)


def _told(message: OomMessage, judgement: Judgement) -> str:
    rows = [(label, getattr(message, name)) for name, label in _FIGURES]
    figures = [f"  {label:<22} {amount(figure.bytes):>14}" for label, figure in rows if figure is not None]
    for process in message.other_processes[:8]:
        mine = " (this job itself)" if process.pid == judgement.own_pid else ""
        figures.append(
            f"  {f'process {process.pid}':<22} {amount(process.used.bytes) if process.used else 'not known':>14}{mine}"
        )
    if len(message.other_processes) > 8:
        figures.append(f"  and {len(message.other_processes) - 8} more processes")
    reasons = [f"  {reason}" for reason in judgement.reasons]
    advice = [f"  try: {advice}" for advice in judgement.advice]
    return "\n".join([_title(message, judgement), *reasons, *figures, *advice])


_WHAT = {
    Origin.ALLOCATOR: "out of memory",
    Origin.ASYNC: "out of memory (cudaMallocAsync)",
    Origin.POLICY: "refused by policy",
    Origin.DRIVER: "the driver is out of memory",
    Origin.LIBRARY: "a library is out of memory",
    Origin.NCCL: "NCCL is out of memory",
    Origin.HOST: "the host is out of memory",
    Origin.MASKED: "out of memory, its text lost",
    Origin.ASSERT: "device-side assert",
    Origin.RETRY: "an attempt failed, and is made again",
}


def _title(message: OomMessage, judgement: Judgement) -> str:
    who = [f"line {message.line}"]
    if message.rank is not None:
        who.append(f"rank {message.rank}")
    if message.worker:
        who.append(message.worker)
    if message.device is not None:
        who.append(f"device {message.device}")
    if message.times > 1:
        who.append(f"{message.times} times")
    return f"{', '.join(who)}: {_WHAT[message.origin]}: {judgement.verdict.value.replace('_', ' ').upper()}"


def _bytes(figure: Figure | None) -> int | None:
    return None if figure is None else figure.bytes
