"""Thin stand-in for the bill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allocscope.model.bill import BillEntry, DeviceBill, Line
from allocscope.model.blocks import BlockMap
from allocscope.model.sample import Sample


@dataclass(frozen=True, slots=True)
class Tenant:
    """A process with a probe on the device."""

    process_id: str
    sample: Sample | None
    block_map: BlockMap | None
    used_bytes: int | None


def device_bill(
    *,
    total_bytes: int,
    free_bytes: int | None,
    driver_bytes: int | None,
    tenants: Sequence[Tenant],
    others_bytes: int | None,
) -> DeviceBill:
    """Where every byte is."""
    entries = [entry for tenant in tenants for entry in _of_tenant(tenant)]
    left = total_bytes - sum(entry.bytes for entry in entries)
    free = min(free_bytes if free_bytes is not None else left, left)
    left -= free
    driver = min(driver_bytes or 0, left)
    entries.append(BillEntry(Line.OTHER_PROCESSES, left - driver, exact=False))
    entries.append(BillEntry(Line.DRIVER, driver))
    entries.append(BillEntry(Line.FREE, free))
    return DeviceBill(total_bytes, tuple(entries))


def _of_tenant(tenant: Tenant) -> Iterator[BillEntry]:
    sample = tenant.sample
    if sample is None or sample.reserved_bytes is None or sample.allocated_bytes is None:
        return
    requested = min(sample.requested_bytes or 0, sample.allocated_bytes)
    stranded = min(sample.inactive_split_bytes or 0, sample.reserved_bytes - sample.allocated_bytes)
    lines = {
        Line.REQUESTED: requested,
        Line.ROUNDING: sample.allocated_bytes - requested,
        Line.STRANDED: stranded,
        Line.RELEASABLE: sample.reserved_bytes - sample.allocated_bytes - stranded,
        Line.OUTSIDE: max((tenant.used_bytes or 0) - sample.reserved_bytes, 0),
    }
    for line, figure in lines.items():
        yield BillEntry(line, figure, exact=False, process_id=tenant.process_id)
