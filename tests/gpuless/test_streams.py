"""Streams, events, captures and private pools: what is pending, what a capture forbids, and what a pool keeps."""

import pytest

from tests.gpuless.rig import MIB, JobError, Rig
from tests.gpuless.test_rig import PRELUDE, STEPS

PENDING = {"GPULESS_EVENTS": "pending"}
POOLS = "sorted((segment['segment_pool_id'], segment['total_size']) for segment in torch.cuda.memory_snapshot())"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One job for all of these; each gives back what it took."""
    rig = Rig(tmp_path_factory.mktemp("streams"))
    with rig.shell() as job:
        job(PRELUDE)
        job("import gc, threading, ctypes; torch.cuda.init()")
        yield job


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    if "job" in request.fixturenames:
        job = request.getfixturevalue("job")
        assert job("held.clear(); gc.collect(); torch.cuda.empty_cache(); torch.cuda.memory_reserved()") == 0


def test_a_block_waits_for_the_other_stream(rig):
    """The cross-stream figures of PyTorch 2.14.1: active_bytes stay until the malloc after the event."""
    with rig.shell(PENDING) as job:
        job(PRELUDE)
        for step, _ in STEPS[:9]:
            job(step)
        job("stream = torch.cuda.Stream(); held['f'].record_stream(stream); del held['f']")
        requested, allocated, active = job("row()[:3]")
        assert (requested, allocated, active) == (45089769, 15205376, 46662656)
        job("alloc('h', 100); del held['h']")
        assert job("row()[2]") == 46662656
        job("stream.synchronize(); alloc('i', 100)")
        assert job("row()[:3]") == [13632589, 15205888, 15205888]


def test_events_wait_for_whatever_synchronizes(job):
    job("runtime = ctypes.CDLL(None); runtime.gpuless_events_pending(1)")
    job("stream = torch.cuda.Stream(); event = torch.cuda.Event(); event.record(stream)")
    assert job("event.query(), stream.query()") == [False, False]
    job("event.synchronize()")
    assert job("event.query(), stream.query()") == [True, True]
    job("event.record(stream); torch.cuda.synchronize()")
    assert job("event.query()") is True
    job("event.record(stream); runtime.gpuless_events_pending(0)")
    assert job("event.query()") is True


def test_a_graph_keeps_its_pool_while_it_lives(job):
    job("graph = torch.cuda.CUDAGraph()")
    job("with torch.cuda.graph(graph):\n    alloc('a', 30 << 20)\n    held['b'] = held['a'] + 1\ngraph.replay()")
    (pool, size), (same, _) = job(POOLS)
    assert (pool != [0, 0], size, same) == (True, 30 * MIB, pool)
    job("held.clear(); torch.cuda.empty_cache()")
    assert job(POOLS) == [[pool, 30 * MIB], [pool, 30 * MIB]]
    name = "reserved_bytes_by_private_pools.{}_{}.all.current".format(*pool)
    assert job(f"torch.cuda.memory_stats()[{name!r}]") == 60 * MIB
    job("del graph")


def test_a_mem_pool_is_apart_and_goes_with_its_object(job):
    job("pool = torch.cuda.MemPool()\nwith torch.cuda.use_mem_pool(pool):\n    alloc('a', 4 << 20)")
    job("alloc('b', 4 << 20); del held['a']; torch.cuda.empty_cache()")
    assert [size for _, size in job(POOLS)] == [20 * MIB, 20 * MIB]
    job("del pool")
    assert job(POOLS) == [[[0, 0], 20 * MIB]]


CAPTURE = """
graph, told = torch.cuda.CUDAGraph(), []
def ask():
    if {mode} is not None:
        torch.cuda.cudart  # the runtime is there
        mode = ctypes.c_int({mode})
        told.append(ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        told.append(torch.cuda.mem_get_info(0)[1])
    except Exception as error:
        told.append(str(error).splitlines()[0])
with torch.cuda.graph(graph, capture_error_mode={error_mode!r}):
    held["a"] = torch.empty(1 << 20, device="cuda") + 1
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
"""
RELAXED, GIB_24 = 2, 24 << 30


def test_a_thread_that_asks_the_driver_spoils_a_capture_of_another(job):
    with pytest.raises(JobError, match="operation failed due to a previous error during capture"):
        job(CAPTURE.format(mode=None, error_mode="global"))
    assert job("told") == ["CUDA error: operation not permitted when stream is capturing"]
    job("del graph")


def test_a_relaxed_thread_spoils_nothing(job):
    job(CAPTURE.format(mode=RELAXED, error_mode="global"))
    assert job("told") == [0, GIB_24]
    job("graph.replay(); del graph")


def test_a_capture_of_its_thread_alone_bears_other_threads(job):
    job(CAPTURE.format(mode=None, error_mode="thread_local"))
    assert job("told") == [GIB_24]
    job("del graph")


def test_a_stream_that_waits_for_a_capture_joins_it(job):
    job(
        "graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()\n"
        "with torch.cuda.graph(graph):\n"
        "    other.wait_stream(torch.cuda.current_stream())\n"
        "    with torch.cuda.stream(other):\n"
        "        joined = torch.cuda.is_current_stream_capturing()\n"
        "    torch.cuda.current_stream().wait_stream(other)\n"
        "    torch.zeros(8, device='cuda')\n"
        "with torch.cuda.stream(other):\n"
        "    after = torch.cuda.is_current_stream_capturing()\n"
        "del graph"
    )
    assert job("joined, after") == [True, False]
