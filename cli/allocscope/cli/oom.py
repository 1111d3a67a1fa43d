"""`allocscope oom`: what the out-of-memory texts of a log say, and what they prove."""

from __future__ import annotations

import argparse
import codecs
import errno
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from allocscope.allocator.messages import Figure, Judgement, OomMessage, OomReport, judge, read_log
from allocscope.cli.oom_text import as_text
from allocscope.cli.prose import prose_width

HELP = "explain the out-of-memory texts in a log"

BROKEN = (OSError, EOFError, zlib.error)
"""What reading a file, packed or not, raises where it cannot go on."""
_HEAD_BYTES, _CHUNK_BYTES = 16, 1 << 20
_NO_LOGS = (
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle"),
    (re.compile(rb"PK\x03\x04"), "a zip archive (as .pt files are)"),
    (re.compile(rb"\x89PNG|GIF8|\xff\xd8\xff"), "a picture"),
    (re.compile(rb"\x7fELF|%PDF"), "a binary file"),
)
"""How what is often given by mistake begins."""


class NotALogError(Exception):
    """What should be a log is something else."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"is no log, but {what}; a PyTorch memory snapshot is read by allocscope inspect, and oom wants a job's output"
        )
        self.what = what


def main(arguments: list[str]) -> int:
    """Exit status: 0 whether or not a text is found, 2 where the file cannot be read to its end, or is no log."""
    options = _parser().parse_args(arguments)
    end = _End()
    try:
        report = _report(options.file, end)
    except BROKEN as error:
        print(f"allocscope oom: cannot read {options.file}: {_why(error)}", file=sys.stderr)
        return 2
    except NotALogError as error:
        print(f"allocscope oom: {options.file} {error}", file=sys.stderr)
        return 2
    if end.error is None or report.messages:
        print(json.dumps(as_json(report)) if options.json else as_text(report, prose_width()))
    if end.error is not None:
        further = f" further than line {report.lines}" if report.lines else ""
        print(f"allocscope oom: cannot read {options.file}{further}: {_why(end.error)}", file=sys.stderr)
        return 2
    return 0


def _why(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "its gzip ends in the middle; copy it again"
    return getattr(error, "strerror", None) or str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allocscope oom",
        description=HELP,
        epilog="example: kubectl logs train-0 | allocscope oom -",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", metavar="FILE", help="a log of any size, .gz too; - reads the standard input, packed or not"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


class _End:
    """How a log ends: what broke it off is told after what was read of it."""

    error: Exception | None = None

    def of(self, chunks: Iterator[str]) -> Iterator[str]:
        """The same, without an error."""
        try:
            yield from chunks
        except BROKEN as error:
            self.error = error


def _report(file: str, end: _End) -> OomReport:
    if file == "-":
        if sys.stdin is None:  # the shell's `<&-`
            raise OSError(errno.EBADF, "the standard input is closed")
        return _read(cast(io.BufferedReader, sys.stdin.buffer), end)
    with Path(file).open("rb") as log:
        return _read(log, end)


def _read(log: io.BufferedReader, end: _End) -> OomReport:
    """Packed or plain; it may be a pipe, which cannot go back."""
    if log.peek(2).startswith(b"\x1f\x8b"):
        with gzip.open(log) as unpacked:
            return read_log(end.of(text_of(unpacked)))
    return read_log(end.of(text_of(log)))


def text_of(log: io.BufferedReader | gzip.GzipFile) -> Iterator[str]:
    """The log's text by chunks; UTF-8, or UTF-16 where its first bytes say so (a PowerShell redirection).

    Where it breaks off all that can be read comes before the error.
    """
    chunk = log.read(_HEAD_BYTES)
    for beginning, what in _NO_LOGS:
        if beginning.match(chunk):
            raise NotALogError(what)
    wide = chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")("replace")
    while chunk:
        yield decoder.decode(chunk)
        chunk = log.read1(_CHUNK_BYTES)
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


def _bytes(figure: Figure | None) -> int | None:
    return None if figure is None else figure.bytes
