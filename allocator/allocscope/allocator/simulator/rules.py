"""What differs between versions of PyTorch (ALLOCATOR.md 2.3, 2.4, 14)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

NEWEST = "2.14.1"


class Order(Enum):
    """Which of equally large free blocks of a stream is taken first."""

    ADDRESS = "address"
    """The lowest address: up to 2.11."""
    BLOCK = "block"
    """The block object made first: 2.12. A split's front piece is new, its remainder keeps its place."""
    SEGMENT = "segment"
    """Of the segment made first, and there the lowest address: from 2.13 on."""


@dataclass(frozen=True, slots=True)
class Rules:
    """One version's rules."""

    order: Order
    pool_context_captures: bool
    """Up to 2.12 merely routing to a private pool stops reaping and flushing, as a capture does."""
    tells_rejections: bool
    """Whether throw_on_cudamalloc_oom, and num_oom_rejections, exist: from 2.12 on."""
    tells_private_pools: bool
    """Whether memory_stats has reserved_bytes_by_private_pools: from 2.13 on."""
    hints_when_expandable: bool
    """Whether the error's text recommends expandable segments to those who have them: up to 2.13."""
    documentation: str
    """The address at the end of the error's text."""


_VERIFIED = frozenset(((2, 11), (2, 12), (2, 13), (2, 14)))
_RELEASE = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")


def is_version(told: str) -> bool:
    """Whether `rules_of` knows what to make of it."""
    return _RELEASE.match(told) is not None


def is_verified(version: str) -> bool:
    """Whether the rules of this version are known by trial, and not only the nearest that are. ValueError: it is none."""
    return _release(version) in _VERIFIED


def _release(version: str) -> tuple[int, int]:
    found = _RELEASE.match(version)
    if found is None:
        raise ValueError(f"{version!r} is not a version of PyTorch, such as {NEWEST}")
    return int(found[1]), int(found[2])


def rules_of(version: str) -> Rules:
    """The rules of a version, such as "2.14.1+cu130"; verified for 2.11.0, 2.12.1, 2.13.0 and 2.14.1, others by the nearest."""
    release = _release(version)
    if release >= (2, 13):
        order = Order.SEGMENT
    elif release >= (2, 12):
        order = Order.BLOCK
    else:
        order = Order.ADDRESS
    return Rules(
        order=order,
        pool_context_captures=release <= (2, 12),
        tells_rejections=release >= (2, 12),
        tells_private_pools=release >= (2, 13),
        hints_when_expandable=release <= (2, 13),
        documentation=_OPTIMIZING if release >= (2, 14) else _ENVIRONMENT,
    )


_OPTIMIZING = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)
_ENVIRONMENT = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"
