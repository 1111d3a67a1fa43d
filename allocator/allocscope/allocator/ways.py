"""How a request is served."""

from __future__ import annotations

from enum import Enum


class Way(Enum):
    """How a request would be served."""

    CACHE = "cache"
    """From a free block of its pool and stream."""
    DEVICE = "device"
    """By the driver."""
    AFTER_RELEASE = "after_release"
    """By the driver, once cached segments have been given back: as a rule all of them, and a retry."""
    NONE = "none"
    """Not at all: OutOfMemoryError."""
