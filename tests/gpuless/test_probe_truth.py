"""What the probe tells is what torch itself says at the same point, to the byte: every figure, every block, every backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from allocscope.model import BlockMap, PrivatePool, Sample
from tests.gpuless.rig import GIB, MIB, Rig
from tests.gpuless.watched import Watched, watched

SAID = {
    "allocated_bytes": "allocated_bytes.all.current", "active_bytes": "active_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current", "reserved_bytes": "reserved_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "allocated_peak_bytes": "allocated_bytes.all.peak", "active_peak_bytes": "active_bytes.all.peak",
    "requested_peak_bytes": "requested_bytes.all.peak", "reserved_peak_bytes": "reserved_bytes.all.peak",
    "allocation_count": "allocation.all.current", "active_count": "active.all.current",
    "segment_count": "segment.all.current", "inactive_split_count": "inactive_split.all.current",
    "allocations_total": "allocation.all.allocated", "allocated_bytes_total": "allocated_bytes.all.allocated",
    "num_alloc_retries": "num_alloc_retries", "num_ooms": "num_ooms", "num_device_alloc": "num_device_alloc",
    "num_device_free": "num_device_free", "num_sync_all_streams": "num_sync_all_streams",
}  # fmt: skip
"""By the names of a sample, those of torch.cuda.memory_stats()."""
LINES = ("reserved_bytes", "allocated_bytes", "requested_bytes", "awaiting_free_bytes", "free_bytes", "private_bytes")


def agrees(job: Watched, device: int = 0) -> Sample:
    """The sample that equals torch's own counters."""
    sample, stats = job.sample(), job.stats(device)
    assert {name: getattr(sample, name) for name in SAID} == {name: stats[key] for name, key in SAID.items()}
    private = [v for k, v in stats.items() if k.startswith("reserved_bytes_by_") and k.endswith("all.current")]
    assert sample.private_pools_reserved_bytes == sum(private)
    assert [sample.device_free_bytes, sample.device_total_bytes] == job(f"torch.cuda.mem_get_info({device})")
    return sample


def tallied(segments: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, int]]:
    """A snapshot's bytes by pool, stream, private pool and kind of segment."""
    groups: dict[tuple[Any, ...], dict[str, int]] = defaultdict(
        lambda: dict.fromkeys((*LINES, "segments", "largest"), 0)
    )
    for segment in segments:
        pool_id = tuple(segment["segment_pool_id"])
        key = (segment["segment_type"], segment["stream"], pool_id, segment["is_expandable"])
        group = groups[key]
        group["segments"] += 1
        group["reserved_bytes"] += segment["total_size"]
        for block in segment["blocks"]:
            size = block["size"]
            if block["state"] == "active_allocated":
                group["allocated_bytes"] += size
                group["requested_bytes"] += block["requested_size"]
            elif block["state"] == "inactive":
                group["free_bytes"] += size
                group["private_bytes"] += size if pool_id != (0, 0) else 0
                group["largest"] = max(group["largest"], size)
            else:
                group["awaiting_free_bytes"] += size
    return dict(groups)


def mapped(block_map: BlockMap) -> dict[tuple[Any, ...], dict[str, int]]:
    """A block map's bytes, likewise."""
    groups = {}
    for g in block_map.groups:
        pool = (0, 0) if g.private_pool is None else (g.private_pool.first, g.private_pool.second)
        groups[g.pool.value, g.stream, pool, g.expandable] = {
            "reserved_bytes": g.reserved_bytes, "allocated_bytes": g.allocated_bytes,
            "requested_bytes": g.requested_bytes or 0, "awaiting_free_bytes": g.awaiting_free_bytes,
            "free_bytes": g.stranded_bytes + g.releasable_bytes + g.private_bytes, "private_bytes": g.private_bytes,
            "segments": g.segment_count, "largest": g.largest_free_block_bytes or 0,
        }  # fmt: skip
    return groups


def maps(job: Watched) -> BlockMap:
    """The block map that equals torch's own snapshot."""
    block_map = job.block_map()
    assert mapped(block_map) == tallied(job.segments())
    return block_map


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Iterator[Watched]:
    """A job with torch's own allocator that these tests use one after the other."""
    folder = tmp_path_factory.mktemp("native")
    with watched(Rig(folder), folder) as job:
        job("train(1)")
        job.look_often()
        yield job


def test_training_with_lengths_that_vary(native):
    for steps in (1, 5, 20):
        native(f"train({steps})")
        agrees(native)
        maps(native)


def test_serving_with_caches_that_grow(native):
    native("serve(500)")
    agrees(native)
    groups = maps(native).groups
    assert sum(group.stranded_bytes for group in groups) > 0
    native("held.pop('caches'); torch.cuda.empty_cache()")
    assert agrees(native).num_sync_all_streams


def test_peaks_that_the_job_resets_are_its_own(native):
    native("x = torch.empty(1 << 28, dtype=torch.uint8, device='cuda'); del x")
    assert (agrees(native).allocated_peak_bytes or 0) > 1 << 28
    native("torch.cuda.reset_peak_memory_stats(); torch.cuda.reset_accumulated_memory_stats()")
    assert (agrees(native).allocated_peak_bytes or 0) < 1 << 28


def test_a_cuda_graph_keeps_a_pool_of_its_own(native):
    native("capture_graph()")
    sample, groups = agrees(native), maps(native).groups
    [pool] = [group for group in groups if group.private_pool is not None]
    assert pool.private_pool is not None
    assert pool.private_bytes > 0
    assert sample.private_pools_reserved_bytes == pool.reserved_bytes
    native("held.clear()")


def test_a_graph_is_captured_while_the_probe_asks_the_driver(native):
    """A call of another thread that may not be made then would spoil it: cudaErrorStreamCaptureInvalidated."""
    seen = len(native.receiver.samples())
    assert native(
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    sampler, y = app._probe._sampler, torch.empty(1 << 20, device='cuda')\n"
        "    until, rounds = time.monotonic() + 60, sampler._rounds + 3\n"
        "    while sampler._rounds < rounds and time.monotonic() < until: y = y + 1\n"
        "graph.replay()\n"
        "del graph, y; torch.cuda.empty_cache()\n"
        "True"
    )
    native.receiver.wait_for(lambda: len(native.receiver.samples()) > seen + 1)
    during = native.receiver.samples()[seen:]
    assert all(sample.device_free_bytes for sample in during)


def test_a_pool_of_the_programs_own(native):
    native(
        "pool = torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(pool): mine = torch.empty(5 << 20, device='cuda')"
    )
    agrees(native)
    assert [g.private_pool for g in maps(native).groups if g.private_pool] == [PrivatePool(*native("pool.id"))]
    native("del mine, pool")
    agrees(native)
    maps(native)


def test_with_caching_switched_off_while_it_runs_the_cache_is_told_as_it_is(native):
    native(
        "torch.cuda.memory.caching_allocator_enable(False); x = torch.empty(1 << 26, dtype=torch.uint8, device='cuda')"
    )
    sample = agrees(native)
    maps(native)
    outside = native.rig.used_bytes() - (sample.reserved_bytes or 0)
    assert outside == 500 * MIB + (1 << 26)
    native("del x; torch.cuda.memory.caching_allocator_enable(True)")
    agrees(native)


def test_expandable_segments(tmp_path):
    with watched(Rig(tmp_path), tmp_path, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as job:
        job("train(1)")
        job.look_often()
        job("train(10); serve(300)")
        assert agrees(job).segment_count == 0
        assert {group.expandable for group in maps(job).groups} == {True}
        job("held.pop('caches'); torch.cuda.empty_cache()")
        agrees(job)
        maps(job)
        assert job.receiver.hellos()[-1].allocator_conf == "expandable_segments:True"


def test_blocks_that_wait_for_another_stream(tmp_path):
    with watched(Rig(tmp_path), tmp_path, {"GPULESS_EVENTS": "pending"}) as job:
        job("cross_streams(8)")
        job.look_often()
        sample, block_map = agrees(job), maps(job)
        waiting = sum(group.awaiting_free_bytes for group in block_map.groups)
        assert waiting == (sample.active_bytes or 0) - (sample.allocated_bytes or 0) > 8 * MIB
        job("torch.cuda.synchronize(); x = torch.empty(1, device='cuda')")
        assert sum(group.awaiting_free_bytes for group in maps(job).groups) == 0
        agrees(job)


def test_the_drivers_allocator_tells_three_figures_and_no_blocks(tmp_path):
    with watched(Rig(tmp_path), tmp_path, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}) as job:
        job("train(2)")
        job.look_often()
        sample, stats = job.sample(), job.stats()
        told = {name for name in SAID if getattr(sample, name) is not None}
        assert told == {
            "allocated_bytes", "active_bytes", "reserved_bytes",
            "allocated_peak_bytes", "active_peak_bytes", "reserved_peak_bytes",
        }  # fmt: skip
        assert {name: getattr(sample, name) for name in told} == {name: stats[SAID[name]] for name in told}
        assert (sample.allocated_bytes or 0) > MIB
        assert sample.private_pools_reserved_bytes is None
        assert job.receiver.block_maps() == []
        assert job.receiver.hellos()[-1].allocator_conf == "backend:cudaMallocAsync"
        assert job("run_out()").startswith("Allocation on device 0 would exceed allowed memory.")
        assert job.receiver.events() == []  # of which this allocator tells nobody
        assert (job.sample().allocated_bytes or 0) > MIB


PLUGGED = """
library = next(path for path in __import__('os').environ['LD_LIBRARY_PATH'].split(':')) + '/libgpuless-pluggable.so'
torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(library, 'gpuless_malloc', 'gpuless_free'))
"""


@pytest.mark.parametrize(
    ("environ", "prelude"),
    [({}, PLUGGED), ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "")],
    ids=["a pluggable allocator", "caching switched off"],
)
def test_an_allocator_that_counts_nothing_is_introduced_with_its_devices(tmp_path, environ, prelude):
    rig = Rig(tmp_path, devices=2)
    with watched(rig, tmp_path, environ) as job:
        job(f"{prelude}\nx = torch.empty(1 << 26, dtype=torch.uint8, device='cuda:1')")
        job.receiver.wait_for(lambda: [p for p in job.receiver.hellos() if p.devices])
        process = job.receiver.hellos()[-1]
        assert [(d.uuid, d.index) for d in process.devices] == [(rig.uuid(1), 1)]
        assert (job.receiver.samples(), job.receiver.block_maps()) == ([], [])
        assert rig.holders(0) == {}


def test_ranks_see_their_own_devices_by_uuid(tmp_path):
    """As a launcher starts them: each with one device visible, or all of them and its own chosen."""
    rig = Rig(tmp_path, devices=2, capacity_bytes=8 * GIB)
    ranks: list[Mapping[str, str]] = [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1,0"},
    ]
    for place, environ in enumerate(ranks):
        folder = tmp_path / str(place)
        folder.mkdir()
        with watched(rig, folder, environ) as job:
            job(f"x = torch.empty(1 << 20, device='cuda:{place}')")
            job.receiver.wait_for(job.receiver.block_maps)
            process = job.receiver.hellos()[-1]
            assert (process.rank, process.world_size, process.local_rank) == (place, 2, place)
            assert [(d.uuid, d.index) for d in process.devices] == [(rig.uuid(1 - place), place)]
            assert list(rig.holders(1 - place)) == [process.pid]
            assert rig.holders(place) == {}


def test_nothing_of_cuda_is_initialized_by_the_probe(tmp_path):
    """A job that imports torch, with the probe in it, and never uses CUDA: no context, no device memory, no thread of CUDA's."""
    rig = Rig(tmp_path)
    with watched(rig, tmp_path) as job:
        job.receiver.wait_for(lambda: True)
        job("probe.start(); logging.disable(); [app._probe.step() for _ in range(20)]")
        assert job("torch.cuda.is_initialized()") is False
        assert (rig.holders(), rig.used_bytes()) == ({}, 0)
        job("torch.cuda.init()")
        job.receiver.wait_for(job.receiver.hellos)
        job("[app._probe.step() for _ in range(20)]")
        assert (rig.holders(), rig.used_bytes()) == ({}, 0)
        assert job.receiver.hellos()[-1].devices == ()
