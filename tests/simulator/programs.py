"""Made-up programs: what they ask of an allocator, and how an allocator is judged."""

import os
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from allocscope.allocator.errors import OutOfMemoryError
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator

MIB = 1 << 20
THOROUGHLY = int(os.environ.get("ALLOCSCOPE_TEST_THOROUGHLY", "1"))
"""How many times as many programs are tried."""
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
CONFS = (
    "",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:40",
    "expandable_segments:True,large_segment_size_mb:32,roundup_power2_divisions:4",
    "max_split_size_mb:20",
    "max_split_size_mb:32,max_non_split_rounding_mb:40",
    "max_split_size_mb:64,garbage_collection_threshold:0.4,per_process_memory_fraction:0.7",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
    "per_process_memory_fraction:0.6",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[1:1,4:2,16:4,>:8]",
    "large_segment_size_mb:12",
    "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.8",
    "throw_on_cudamalloc_oom:True",
)
EDGES: tuple[int, ...] = (
    *(1, 511, 512, 513, MIB - 512, MIB - 1, MIB, MIB + 1, 2 * MIB, 3 * MIB + 7),
    *(10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 18 * MIB, 19 * MIB, 20 * MIB, 20 * MIB + 512, 21 * MIB),
    *(32 * MIB - 512, 32 * MIB, 40 * MIB, 64 * MIB, 70 * MIB),
)

sizes = st.one_of(
    st.sampled_from(EDGES),
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(1, 24 * MIB),
    st.integers(1, 90 * MIB),
)
streams = st.sampled_from((0, 0, 0, 1, 2))
requests = st.one_of(
    st.tuples(st.just("malloc"), sizes, streams),
    st.tuples(st.just("malloc"), sizes, streams),
    st.tuples(st.just("free"), st.integers(0, 1 << 16)),
    st.tuples(st.just("free"), st.integers(0, 1 << 16)),
    st.tuples(st.just("record_stream"), st.integers(0, 1 << 16), streams),
    st.tuples(st.just("catch_up")),
    st.tuples(st.just("empty_cache")),
)


@dataclass(frozen=True)
class Program:
    conf: str
    version: str
    total_mib: int
    requests: list

    def allocator(self, *, trace=False):
        return Simulator(
            parse_settings(self.conf),
            Device(self.total_mib * MIB, other_bytes=7 * MIB),
            version=self.version,
            trace=trace,
        )


def programs(confs=CONFS, versions=VERSIONS, *, longest=120):
    return st.builds(
        Program,
        conf=st.sampled_from(confs),
        version=st.sampled_from(versions),
        total_mib=st.integers(30, 400),
        requests=st.lists(requests, min_size=1, max_size=longest),
    )


def step(allocator: Simulator, live: list[int], request) -> int | None:
    """Do it; the address of an allocation; `live` are the addresses that the program holds."""
    match request:
        case ("malloc", size, stream):
            try:
                address = allocator.malloc(size, stream)
            except OutOfMemoryError:
                return None
            live.append(address)
            return address
        case ("free", which) if live:
            allocator.free(live.pop(which % len(live)))
        case ("record_stream", which, stream) if live:
            allocator.record_stream(live[which % len(live)], stream)
        case ("catch_up",):
            allocator.catch_up()
        case ("empty_cache",):
            allocator.empty_cache()
    return None


def run(allocator: Simulator, requests) -> list[int]:
    live: list[int] = []
    for request in requests:
        step(allocator, live, request)
    return live


def check_blocks(segments, live):
    """Nothing overlaps, blocks fill their segments, neighbours that could be one are one, and the program's are there."""
    ends = [(s["address"], s["address"] + s["total_size"]) for s in segments]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in list(pairwise(states))
    held = [b["address"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    assert sorted(held) == sorted(live)


def stats_of_blocks(segments):
    """What memory_stats() must say now, from the blocks alone."""
    found: dict[str, int] = {}
    for name, kinds in (("all", ("small", "large")), ("small_pool", ("small",)), ("large_pool", ("large",))):
        own = [s for s in segments if s["segment_type"] in kinds]
        blocks = [(s, b) for s in own for b in s["blocks"]]
        live = [b for _, b in blocks if b["state"] == "active_allocated"]
        active = [b for _, b in blocks if b["state"] != "inactive"]
        split = [b for s, b in blocks if b["state"] == "inactive" and len(s["blocks"]) > 1 and not s["is_expandable"]]
        figures = {
            "allocation": len(live),
            "allocated_bytes": sum(b["size"] for b in live),
            "active": len(active),
            "active_bytes": sum(b["size"] for b in active),
            "requested_bytes": sum(b["requested_size"] for b in active),
            "segment": sum(not s["is_expandable"] for s in own),
            "reserved_bytes": sum(s["total_size"] for s in own),
            "inactive_split": len(split),
            "inactive_split_bytes": sum(b["size"] for b in split),
        }
        found |= {f"{family}.{name}.current": figure for family, figure in figures.items()}
    return found
