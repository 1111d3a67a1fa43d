"""What `allocscope log` can be asked for."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from allocscope.allocator.chronicle.choice import WORDS, Choice
from allocscope.cli.figures import read_size
from allocscope.cli.log_source import LogError

_AGO = re.compile(r"-?(\d{1,12}(?:\.\d{1,6})?) ?(us|ms|s|m|min|h|)")
_UNITS_US = {"us": 1, "ms": 1e3, "s": 1e6, "": 1e6, "m": 60e6, "min": 60e6, "h": 3600e6}
_STAMP = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?\s?(Z|[+-]\d\d:?\d\d)?")
_STAMP_WITHIN = 120
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parser(does: str) -> argparse.ArgumentParser:
    """Its options; `does`: what the command does."""
    parser = argparse.ArgumentParser(
        prog="allocscope log",
        description=f"{does}. FILE is a snapshot with its history: what torch.cuda.memory._dump_snapshot() writes once "
        "torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000) was called before, PyTorch 2.0 to 2.14; "
        "or RUN.run.json; or a log with lines of the form that blog posts show.",
        epilog="example: allocscope log snapshot.pickle --kind flush,oom --since 30s",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="packed by gzip or not; - is the standard input")
    parser.add_argument("--summary", action="store_true", help="what it came to, and what of that is normal")
    parser.add_argument("--json", action="store_true", help="an object a line; with --summary one object")
    parser.add_argument("--utc", action="store_true", help="moments as UTC; default: seconds before the end")
    parser.add_argument("--size", type=_sizes, metavar="MIN[:MAX]", help="blocks of so many bytes, such as 20MiB:1GiB")
    parser.add_argument("--stream", type=_number, metavar="S", help="as the log shows it, such as 0 or 0x7f12")
    parser.add_argument(
        "--pool", type=_pool, metavar="POOL", help="small, large, private, or A.B, a private pool's number"
    )
    parser.add_argument(
        "--since", type=_moment_asked, metavar="WHEN", help="from then on: 30s (before the end), or UTC"
    )
    parser.add_argument("--until", type=_moment_asked, metavar="WHEN", help="up to then: 5s (before the end), or UTC")
    parser.add_argument("--kind", type=_kinds, metavar="KIND[,KIND…]", help=", ".join(WORDS))
    parser.add_argument(
        "--address", type=_number, metavar="A", help="what happened to the blocks that hold this address"
    )
    parser.add_argument("--device", type=_number, metavar="N", help="only this device (default: all)")
    parser.add_argument("--last", type=_count, metavar="N", help="only the last N of the chosen events")
    return parser


# what was asked for


@dataclass(frozen=True, slots=True)
class _When:
    """A moment; unix microseconds, or microseconds before the end."""

    us: int
    before_end: bool

    def at(self, end_us: int | None, file: str) -> int:
        if not self.before_end:
            return self.us
        if end_us is None:
            raise LogError(
                file,
                "its end is not known before it is read, or it tells no times: give --since and --until in UTC, or not",
            )
        return end_us - self.us


def _moment_asked(told: str) -> _When:
    ago = _AGO.fullmatch(told)
    if ago is not None:
        return _When(round(float(ago[1]) * _UNITS_US[ago[2]]), before_end=True)
    moment = stamp_us(told)
    if moment is None:
        raise argparse.ArgumentTypeError(
            f"{told!r} is neither a time before the end, such as 30s, nor one of UTC, such as 2026-01-31T12:00:00"
        )
    return _When(moment, before_end=False)


def stamp_us(line: str) -> int | None:
    """The moment that the beginning of a line tells, unix microseconds; one without a zone is taken for UTC. None: none."""
    found = _STAMP.search(line, 0, _STAMP_WITHIN)
    if found is None:
        return None
    year, month, day, clock, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(f"{year}-{month}-{day}T{clock}{zone or 'Z'}")
        return (moment - _EPOCH) // timedelta(microseconds=1) + int((fraction or "0").ljust(6, "0"))
    except (ValueError, OverflowError):
        return None


def _sizes(told: str) -> tuple[int, int | None]:
    least, _, most = told.partition(":")
    sizes = (read_size(least or "0"), read_size(most) if most else None)
    if not told.strip(":") or (sizes[1] is not None and sizes[1] < sizes[0]):
        raise argparse.ArgumentTypeError(f"{told!r} is not MIN[:MAX], such as 20MiB or 1MiB:10MiB")
    return sizes


def _number(told: str) -> int:
    if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}|\d{1,20}", told) is None:
        raise argparse.ArgumentTypeError(f"{told!r} is not a number, such as 0 or 0x7f8c4a000000")
    return int(told, 16 if told[:2] in ("0x", "0X") else 10)


def _pool(told: str) -> Choice:
    if told in ("small", "large"):
        return Choice(small=told == "small")
    if told == "private":
        return Choice(private=True)
    found = re.fullmatch(r"(\d{1,19})\.(\d{1,19})", told)
    if found is None:
        raise argparse.ArgumentTypeError(f"{told!r} is none of small, large, private, and A.B, such as 0.1")
    return Choice(private_pool=(int(found[1]), int(found[2])))


def _kinds(told: str) -> frozenset[str]:
    kinds = frozenset(filter(None, told.split(",")))
    if not kinds or not kinds <= set(WORDS):
        odd = ", ".join(sorted(kinds - set(WORDS))) or told
        raise argparse.ArgumentTypeError(f"there is no {odd!r}; choose from {', '.join(WORDS)}")
    return kinds


def _count(told: str) -> int:
    if re.fullmatch(r"\d{1,9}", told) is None or not int(told):
        raise argparse.ArgumentTypeError(f"{told!r} is not a number from 1 on")
    return int(told)


def choice_of(asked: argparse.Namespace, end_us: int | None) -> Choice:
    least, most = asked.size or (None, None)
    return replace(
        asked.pool or Choice(),
        kinds=asked.kind or frozenset(),
        least_bytes=least,
        most_bytes=most,
        stream=asked.stream,
        since_us=None if asked.since is None else asked.since.at(end_us, asked.file),
        until_us=None if asked.until is None else asked.until.at(end_us, asked.file),
        address=asked.address,
    )
