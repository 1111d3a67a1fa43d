"""What `allocscope replay` can be asked for."""

from __future__ import annotations

import argparse

from allocscope.allocator.advice import Circumstances
from allocscope.cli.figures import read_size

_THINGS = ("pools", "ipc", "virtual-memory", "nvml")
"""What decides which settings can be used."""


def options(does: str) -> argparse.ArgumentParser:
    """Its options; `does`: what the command does."""
    parser = argparse.ArgumentParser(
        prog="allocscope replay",
        description=does,
        epilog="example: allocscope replay snapshot.pickle --conf expandable_segments:True",
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a snapshot with its history, or RUN.run.json")
    parser.add_argument("--requests", metavar="CASE.json.gz", help="one object: settings, a device, and requests")
    parser.add_argument("--golden", metavar="RUN.jsonl.gz", help="an object a line: a header, then a request each")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        help="other settings to try on FILE's requests, as PYTORCH_CUDA_ALLOC_CONF takes them; may be given several times",
    )
    parser.add_argument(
        "--device-total", type=_read_total, metavar="BYTES", help="of FILE's device; default: what FILE shows"
    )
    parser.add_argument(
        "--device-other",
        type=read_size,
        metavar="BYTES",
        help="of it, in use by others than the allocator; default: what FILE shows",
    )
    parser.add_argument(
        "--memory-fraction",
        type=_read_share,
        metavar="SHARE",
        help="what the program called set_per_process_memory_fraction with; default: what FILE shows",
    )
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        help="what the program could do otherwise, under FILE's settings: buckets:N (shapes padded to N), empty_cache:N (after"
        " every N steps), one_stream, largest_first; may be given several times",
    )
    parser.add_argument("--advise", action="store_true", help="try what is worth it, and recommend one thing, or none")
    parser.add_argument(
        "--has",
        type=_read_things,
        default=frozenset(),
        metavar="THING[,THING]",
        help="what the job has, where FILE does not show it, since it forbids some settings: pools (MemPools, or CUDA graphs with"
        " their own), ipc (tensors shared with other processes), virtual-memory (some vGPUs have none), nvml (libnvidia-ml.so.1)",
    )
    parser.add_argument(
        "--lacks",
        type=_read_things,
        default=frozenset(),
        metavar="THING[,THING]",
        help="what of that it has not; without either it is not known, and advice says what to look for",
    )
    parser.add_argument("--torch", metavar="VERSION", help="FILE's; default: what it says, or what explains it best")
    parser.add_argument("--processes", type=_read_count, metavar="N", help="at once; default: one a processor")
    parser.add_argument("--json", action="store_true", help="one JSON object; sizes in bytes")
    return parser


def _read_share(told: str) -> float:
    try:
        share = float(told)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{told!r} is not a share of the device from 0 to 1, such as 0.8")
    return share


def _read_count(told: str) -> int:
    if not told.isdecimal() or not 1 <= int(told) <= 256:
        raise argparse.ArgumentTypeError(f"{told!r} is not a number of processes from 1 to 256")
    return int(told)


def _read_total(told: str) -> int:
    total = read_size(told)
    if total == 0:
        raise argparse.ArgumentTypeError(f"{told!r} is no device's size, such as 24GiB")
    return total


def _read_things(told: str) -> frozenset[str]:
    things = frozenset(filter(None, told.split(",")))
    if not things or not things <= set(_THINGS):
        odd = ", ".join(sorted(things - set(_THINGS))) or told
        raise argparse.ArgumentTypeError(f"there is no {odd!r}; choose from {', '.join(_THINGS)}")
    return things


def known_of(asked: argparse.Namespace) -> Circumstances:
    """What was told by --has and --lacks."""

    def known(thing: str) -> bool | None:
        return True if thing in asked.has else False if thing in asked.lacks else None

    return Circumstances(
        uses_private_pools=known("pools"),
        uses_ipc=known("ipc"),
        has_virtual_memory=known("virtual-memory"),
        has_nvml=known("nvml"),
    )
