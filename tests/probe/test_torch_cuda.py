"""The calls into torch: only what may be called, only when it may be, and nothing that is missing raises."""

import gc
import threading

import pytest

from allocscope.model import Device, Pool
from allocscope.probe import torch_cuda
from allocscope.probe.torch_blocks import TorchBlocks, groups_of, large_page_bytes
from allocscope.probe.torch_cuda import Absence, Backend, TorchCuda, look
from tests.probe.fake_torch import GIB, FakeTorch, runtime_of, segment

ERRORS = (AttributeError("x"), RuntimeError("x"), KeyError("x"), AssertionError("x"), TypeError("x"))


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    monkeypatch.setattr(torch_cuda, "loaded_runtime", runtime_of)


def ready(torch: FakeTorch) -> TorchCuda:
    found = look(torch.modules)
    assert isinstance(found, TorchCuda)
    return found


def blocks_of(torch: FakeTorch) -> TorchBlocks:
    return TorchBlocks(torch.modules, ready(torch).backend)


def without(torch: FakeTorch, module: str, name: str | None = None) -> dict:
    modules = dict(torch.modules)
    if name is None:
        del modules[module]
    else:
        delattr(modules[module], name)
    return modules


def test_a_torch_that_is_ready_is_found():
    assert isinstance(look(FakeTorch().modules), TorchCuda)
    assert ready(FakeTorch((2, 0))).version == "2.0.0"


@pytest.mark.parametrize(
    ("modules", "absence"),
    [
        ({}, Absence.NO_TORCH),
        (without(FakeTorch(), "torch.cuda"), Absence.NO_TORCH),
        (without(FakeTorch(), "torch.cuda", "is_initialized"), Absence.NO_TORCH),
        ({**FakeTorch().modules, "torch.cuda": None}, Absence.NO_TORCH),
        (without(FakeTorch(), "torch._C", "_cuda_memoryStats"), Absence.NO_CUDA),
    ],
    ids=["not imported", "being imported", "being imported still", "blocked", "built for the CPU"],
)
def test_without_a_torch_that_has_cuda_there_is_nothing(modules, absence):
    assert look(modules) is absence


def test_cuda_is_never_initialized_by_looking():
    torch = FakeTorch()
    torch.is_initialized = False
    assert look(torch.modules) is Absence.NOT_INITIALIZED
    assert torch.calls == ["is_initialized"]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("native", Backend.NATIVE),
        ("cudaMallocAsync", Backend.ASYNC),
        ("pluggable", Backend.PLUGGABLE),
        ("of tomorrow", Backend.PLUGGABLE),
    ],
)
def test_the_backend_is_known_by_its_name(name, backend):
    torch = FakeTorch()
    torch.backend = name
    assert ready(torch).backend is backend


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_of_another_backend_no_blocks_are_asked(backend):
    torch = FakeTorch()
    torch.backend = backend
    cuda_blocks = blocks_of(torch)
    assert (cuda_blocks.segments(), cuda_blocks.snapshot(), cuda_blocks.snapshot(with_traces=False)) == (
        None,
        None,
        None,
    )
    assert not [call for call in torch.calls if "snapshot" in call]


# use


@pytest.mark.parametrize(
    ("figures", "used"),
    [({}, True), ({"reserved_bytes": 0, "allocation": -2}, False), ({"reserved_bytes": 3, "allocation": -2}, True)],
)
@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_a_device_is_in_use_by_its_counters(backend, figures, used):
    torch = FakeTorch()
    torch.backend, torch.contexts, torch.figures = backend, {0}, [figures]
    assert ready(torch).is_used(0) is used


@pytest.mark.parametrize("used", [True, False])
def test_without_counters_it_is_in_use_where_the_process_has_a_context(used):
    torch = FakeTorch()
    torch.backend, torch.contexts = "pluggable", {0} if used else set()
    assert ready(torch).is_used(0) is used
    del torch.modules["torch._C"]._cuda_hasPrimaryContext
    assert not ready(torch).is_used(0)


UNUSED = [{"reserved_bytes": 0, "allocation": -2}]


def test_with_caching_off_counters_say_nothing_and_the_context_does():
    torch = FakeTorch()
    torch.is_caching, torch.contexts, torch.figures = False, {0}, UNUSED
    assert ready(torch).is_used(0)


@pytest.mark.parametrize(("value", "used"), [("1", True), ("", False)])
def test_before_2_12_the_environment_says_whether_caching_is_off(monkeypatch, value, used):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", value)
    torch = FakeTorch((2, 11))
    torch.contexts, torch.figures = {0}, UNUSED
    assert ready(torch).is_used(0) is used


@pytest.mark.parametrize("call", ["is_initialized", "backend", "device_count"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_torch_whose_calls_fail_is_left_alone(call, error):
    torch = FakeTorch()
    torch.fails[call] = error
    assert look(torch.modules) is Absence.NO_ANSWER


def test_only_what_may_pass_is_waited_for():
    assert {a for a in Absence if a.may_pass} == {Absence.NO_TORCH, Absence.NOT_INITIALIZED}


def test_a_module_that_imports_on_access_is_not_touched():
    class Lazy:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked of a lazy module")

    assert look({"torch": Lazy(), "torch.cuda": Lazy(), "torch._C": Lazy()}) is Absence.NO_TORCH


# devices


def test_a_device_is_named_as_nvml_names_it():
    torch = FakeTorch()
    torch.uuids = ["01234567-89ab-cdef-0123-456789abcdef"]
    assert ready(torch).device(0) == Device("GPU-01234567-89ab-cdef-0123-456789abcdef", 0, "Fake H200", 80 * GIB)


def test_a_mig_device_keeps_its_prefix():
    torch = FakeTorch()
    torch.uuids = ["MIG-0123"]
    device = ready(torch).device(0)
    assert device is not None
    assert device.uuid == "MIG-0123"


def test_before_torch_tells_uuids_a_visible_one_serves(monkeypatch):
    torch = FakeTorch((2, 3), devices=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-01234567-89ab-cdef-0123-456789abcdef")
    device = ready(torch).device(1)
    assert device is not None
    assert device.uuid == "GPU-01234567-89ab-cdef-0123-456789abcdef"
    assert ready(torch).device(0) is None


def test_a_memory_fraction_is_told_in_bytes_and_a_whole_one_is_none():
    torch = FakeTorch()
    torch.fractions = [0.5]
    device = ready(torch).device(0)
    assert device is not None
    assert device.allowed_bytes == 40 * GIB
    for told in (1.0, 715827882.7):  # the latter by cudaMallocAsync (torch 2.14.1)
        torch.fractions = [told]
        device = ready(torch).device(0)
        assert device is not None
        assert device.allowed_bytes is None


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_what_fails_is_unknown(error):
    torch = FakeTorch()
    cuda = ready(torch)
    torch.fails = dict.fromkeys(("properties", "snapshot", "memory_info(0)", "conf", "observer"), error)
    assert (cuda.device(0), cuda.memory_info(0), cuda.allocator_conf({})) == (None, None, None)
    assert blocks_of(torch).segments() is None
    assert not cuda.observe_oom(lambda *figures: None)
    torch.fails = {"fraction": error}
    assert cuda.memory_fraction(0) is None
    device = cuda.device(0)
    assert device is not None
    assert device.allowed_bytes is None


# memory


def test_the_driver_is_asked_for_a_device_of_this_process():
    torch = FakeTorch()
    assert ready(torch).memory_info(0) == (70 * GIB, 80 * GIB)


def test_the_driver_is_not_asked_where_no_runtime_is_found(monkeypatch):
    monkeypatch.setattr(torch_cuda, "loaded_runtime", lambda modules: None)
    assert ready(FakeTorch()).memory_info(0) is None


def test_the_end_waits_for_what_other_threads_ask_of_the_blocks_and_nothing_is_asked_after_it():
    torch, asking, goes_on = FakeTorch(), threading.Event(), threading.Event()
    blocks = blocks_of(torch)
    told: list[object] = []

    def on_call(name):
        asking.set()
        goes_on.wait(30)

    torch.on_call = on_call
    thread = threading.Thread(target=lambda: told.append(blocks.segments()))
    thread.start()
    assert asking.wait(30)
    blocks.close(0)  # it waits no longer than it is to
    assert told == []
    threading.Thread(target=goes_on.set).start()
    blocks.close(30)
    thread.join()
    assert told == [[]]
    assert (blocks.segments(), blocks.snapshot()) == (None, None)


def test_segments_come_without_traces_where_that_can_be_asked():
    new, old = FakeTorch((2, 11)), FakeTorch((2, 9))
    assert (blocks_of(new).segments(), blocks_of(old).segments()) == ([], [])
    assert (new.calls[-1], old.calls[-1]) == ("snapshot", "snapshot")


def test_a_whole_snapshot_leaves_its_traces_out_where_that_can_be_asked():
    new, old = FakeTorch((2, 11)), FakeTorch((2, 9))
    for torch in (new, old):
        torch.traces = [[{"action": "alloc"}]]
    without: dict = {"segments": [], "device_traces": [[]], "allocator_settings": {}}
    assert (
        blocks_of(new).snapshot() == blocks_of(old).snapshot() == {**without, "device_traces": [[{"action": "alloc"}]]}
    )
    assert blocks_of(new).snapshot(with_traces=False) == without
    assert blocks_of(old).snapshot(with_traces=False) is None


def test_no_garbage_is_collected_while_a_snapshot_is_taken():
    torch = FakeTorch()
    collecting = []
    torch.on_call = lambda name: collecting.append(gc.isenabled())
    blocks = blocks_of(torch)
    collecting.clear()
    blocks.snapshot()
    gc.disable()
    try:
        blocks.snapshot()
        collecting.append(gc.isenabled())
    finally:
        gc.enable()
    assert collecting == [False, False, False]


def test_segments_are_condensed_by_device():
    segments = [
        segment(0, (512, 500, "active_allocated"), (512, 0, "inactive")),
        segment(1, (1024, 1, "active_allocated")),
    ]
    groups = groups_of(segments, 0, 20 << 20)
    assert groups is not None
    assert [(g.pool, g.requested_bytes, g.stranded_bytes, g.reserved_bytes) for g in groups] == [
        (Pool.SMALL, 500, 512, 1024)
    ]
    assert groups_of(segments, 2, 20 << 20) == ()


@pytest.mark.parametrize("broken", [{"device": 0}, {"device": 0, "segment_type": "huge", "stream": 0, "total_size": 1}])
def test_segments_that_cannot_be_read_make_no_map(broken):
    assert groups_of([broken], 0, 20 << 20) is None


# settings


@pytest.mark.parametrize(
    ("environ", "conf"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, "a:1"),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}, "b:2"),
        ({"PYTORCH_HIP_ALLOC_CONF": "c:3", "PYTORCH_ALLOC_CONF": "a:1"}, "c:3"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "a:1"}, ""),
    ],
)
def test_before_torch_tells_its_settings_the_environment_does(environ, conf):
    assert ready(FakeTorch((2, 9))).allocator_conf(environ) == conf


def test_settings_in_force_win_over_the_environment():
    torch = FakeTorch()
    torch.conf = "expandable_segments:True"
    assert ready(torch).allocator_conf({"PYTORCH_CUDA_ALLOC_CONF": "b:2"}) == "expandable_segments:True"


@pytest.mark.parametrize(
    ("conf", "mib"),
    [
        (None, 20),
        ("", 20),
        ("large_segment_size_mb:64", 64),
        ("a:b, large_segment_size_mb : 32,c:d", 32),
        ("large_segment_size_mb:x", 20),
    ],
)
def test_the_page_of_a_large_expandable_segment_follows_the_settings(conf, mib):
    assert large_page_bytes(conf) == mib << 20
