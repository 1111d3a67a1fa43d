"""Words made up for tests of storage."""

from __future__ import annotations

from typing import Any

from allocscope.model import (
    COLUMNS,
    AllocatorRef,
    BillEntry,
    BlockGroup,
    BlockMap,
    Device,
    DeviceBill,
    DeviceProcess,
    DeviceReading,
    Event,
    EventKind,
    Line,
    Owner,
    Pool,
    PrivatePool,
    Process,
    SampleChunk,
    SizeClass,
)
from allocscope.storage.repository import NodeBatch

UUID = "GPU-5d9d0fd3-0000"
LARGEST = 2**63 - 1


def process(process_id: str = "p1", job: str = "train", **more) -> Process:
    given = {"pid": 4711, "host": "host", "started_us": 1_000, **more}
    return Process(process_id, job, **given)


def ref(process_id: str = "p1", uuid: str = UUID) -> AllocatorRef:
    return AllocatorRef(process_id, uuid)


def chunk(*numbers: int, process_id: Any = "p1", uuid: Any = UUID, times: Any = None, **columns) -> SampleChunk:
    """Samples with these numbers, taken at number × 10 where nothing else is said, that know allocated_bytes = number × 100 or these columns."""
    known = columns or {"allocated_bytes": tuple(n * 100 for n in numbers)}
    return SampleChunk(ref(process_id, uuid), numbers, times or tuple(n * 10 for n in numbers), known)


def full_chunk(first: int, count: int, process_id: str) -> SampleChunk:
    """Samples that know everything."""
    numbers = tuple(range(first, first + count))
    return chunk(*numbers, process_id=process_id, **dict.fromkeys(COLUMNS, numbers))


def batch(
    sequence: int = 1, *chunks: SampleChunk, node: str = "n1", daemon_id: str = "d1", received_us: int = 5_000, **more
) -> NodeBatch:
    """A batch that describes whomever its chunks name, where nothing else is said."""
    named = dict.fromkeys(c.allocator.process_id for c in chunks)
    more.setdefault("processes", tuple(process(process_id) for process_id in named))
    return NodeBatch(node, daemon_id, sequence, closed_us=4_000, received_us=received_us, chunks=chunks, **more)


MAP = BlockMap(
    sequence=7,
    time_us=70,
    call_us=1_234,
    groups=(
        BlockGroup(
            pool=Pool.LARGE,
            stream=LARGEST,
            private_pool=PrivatePool(3, 0),
            expandable=True,
            segment_count=2,
            reserved_bytes=100,
            requested_bytes=55,
            rounding_bytes=5,
            allocated_bytes=60,
            awaiting_free_bytes=0,
            stranded_bytes=10,
            releasable_bytes=20,
            private_bytes=10,
            free_stranded=(SizeClass(8, 2, 17, 9), SizeClass(16, 1, 16, 16)),
            free_releasable=(),
            live=(SizeClass(32, 1, 55, 55),),
            largest_free_block_bytes=16,
            tail_bytes=9,
            tail_kept_bytes=0,
        ),
        BlockGroup(
            pool=Pool.SMALL,
            stream=0,
            private_pool=None,
            expandable=False,
            segment_count=1,
            reserved_bytes=7,
            requested_bytes=None,
            rounding_bytes=None,
            allocated_bytes=7,
            awaiting_free_bytes=0,
            stranded_bytes=0,
            releasable_bytes=0,
            private_bytes=0,
            free_stranded=(),
            free_releasable=(),
            live=(SizeClass(6, 1, 7, 7),),
        ),
    ),
)

OOM = Event(
    "p1", 8, 80, EventKind.OOM, UUID, 2 << 30, 80 << 30, 0, message="CUDA out of memory. Tried to allocate 2.00 GiB …"
)


def reading(time_us: int = 90, free: int = 40, uuid: str = UUID, **more) -> DeviceReading:
    """Of a device of 100 bytes, 50 of them in use by p1."""
    lines = (
        BillEntry(Line.REQUESTED, 50, process_id="p1"),
        BillEntry(Line.STRANDED, 50 - free, exact=False, process_id="p1"),
        BillEntry(Line.DRIVER, 0),
        BillEntry(Line.FREE, free),
    )
    given = {
        "from_nvml": True,
        "free_bytes": free,
        "processes": (
            DeviceProcess(17, "p1", "python", 60, Owner("ann", slurm_job="8812", slurm_step="0")),
            DeviceProcess(18),
        ),
        "bill": DeviceBill(100, lines),
        **more,
    }
    return DeviceReading(Device(uuid, 3, "NVIDIA H200", 100), time_us, **given)
