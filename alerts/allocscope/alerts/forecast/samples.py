"""Samples as the forecast takes them: one row of figures each, -1 for what is not known."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from allocscope.alerts.forecast.rows import LARGEST_BYTES, UNKNOWN, Ints
from allocscope.model import Sample, SampleChunk


class Figures(NamedTuple):
    """One column a figure of `Sample`, one row a sample."""

    sequence: Ints
    time_us: Ints
    allocated_bytes: Ints
    reserved_bytes: Ints
    active_bytes: Ints
    inactive_split_bytes: Ints
    allocated_peak_bytes: Ints
    allocation_count: Ints
    inactive_split_count: Ints
    num_alloc_retries: Ints
    num_device_alloc: Ints
    num_device_free: Ints
    private_pools_reserved_bytes: Ints
    device_total_bytes: Ints
    device_free_bytes: Ints

    def among(self, where: Ints | np.ndarray) -> Figures:
        """Some of them."""
        return Figures(*(column[where] for column in self))


_KNOWN = Figures._fields[2:]
_figures_of = attrgetter(*Figures._fields)


def of_samples(samples: Iterable[Sample]) -> Figures:
    """As many rows as samples."""
    rows = [[UNKNOWN if figure is None else figure for figure in _figures_of(sample)] for sample in samples]
    columns = np.array(rows, np.int64).reshape(len(rows), len(Figures._fields)).T
    return Figures(*columns[:2], *np.minimum(columns[2:], LARGEST_BYTES))


def of_chunk(chunk: SampleChunk) -> Figures:
    """As many rows as the chunk has samples."""
    length, columns = len(chunk), chunk.columns
    known = (columns.get(name) for name in _KNOWN)
    unknown = np.full(length, UNKNOWN, np.int64)
    figures = (unknown if column is None else np.minimum(np.array(column, np.int64), LARGEST_BYTES) for column in known)
    return Figures(np.array(chunk.sequence, np.int64), np.array(chunk.time_us, np.int64), *figures)


def of_chunks(chunks: Iterable[SampleChunk]) -> Figures:
    """As many rows as all of them have samples."""
    return joined([*map(of_chunk, chunks)] or [of_samples(())])


def joined(figures: Iterable[Figures]) -> Figures:
    """One after the other."""
    return Figures(*map(np.concatenate, zip(*figures, strict=True)))
