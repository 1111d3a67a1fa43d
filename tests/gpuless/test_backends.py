"""The other ways in which PyTorch takes device memory, and what a model does with it."""

import pytest

from tests.gpuless.rig import GIB, MIB, JobError, Rig

CONTEXT = 500 * MIB


def holding(rig, job):
    return rig.holders()[job.pid] - CONTEXT


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("plain"), devices=2)
    with rig.shell() as job:
        job("import threading, time")
        yield rig, job


MODEL = """
from torch import nn
def model_and_optimizer(**options):
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 2), nn.Linear(256, 1000)).cuda()
    return model, torch.optim.AdamW(model.parameters(), **options)
def step(model, optimizer):
    tokens = torch.zeros(4, 64, dtype=torch.long).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.cuda.memory_allocated()
"""


@pytest.mark.parametrize("options", ["foreach=True", "fused=True", "foreach=False"])
def test_a_transformer_trains(plain, options):
    """Parameters, two moments of each, and no more from the second step on."""
    _, job = plain
    job(MODEL)
    job(f"before = torch.cuda.memory_allocated(); model, optimizer = model_and_optimizer({options})")
    parameters = job("torch.cuda.memory_allocated() - before")
    steps = job("[step(model, optimizer) - before for _ in range(4)]")
    assert steps[1:] == [steps[1]] * 3
    assert 3 * parameters <= steps[1] < 4 * parameters + 40 * MIB  # cuBLAS's workspace is a tensor too
    assert job("torch.cuda.max_memory_allocated() - before") > steps[1]
    job("del model, optimizer; torch._C._cuda_clearCublasWorkspaces(); torch.cuda.empty_cache()")
    assert job("torch.cuda.memory_allocated() - before") == 0


def test_a_compiled_model_runs(plain):
    _, job = plain
    job("compiled = torch.compile(torch.nn.Linear(64, 64).cuda(), backend='eager')")
    assert job("list(compiled(torch.zeros(8, 64, device='cuda')).shape)") == [8, 64]
    job("del compiled")


def test_what_is_copied_to_a_device_comes_back(plain):
    _, job = plain
    assert job("torch.arange(1 << 20).cuda().to('cuda:1').clone().cpu().sum().item()") == (1 << 19) * ((1 << 20) - 1)
    assert job("torch.arange(100).pin_memory().cuda(non_blocking=True).cpu()[-1].item()") == 99


def test_pretended_gigabytes_take_no_memory_here(plain):
    _, job = plain
    job("resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096")
    job("before = resident(); held = torch.zeros(10 << 30, dtype=torch.uint8, device='cuda'); more = held.clone()")
    assert job("resident() - before") < 64 * MIB
    job("del held, more; torch.cuda.empty_cache()")


def test_a_slow_driver_holds_the_allocators_lock(plain):
    """Counters wait behind a cudaMalloc, and PyTorch holds the interpreter's lock meanwhile (ALLOCATOR.md 11)."""
    rig, job = plain
    rig.fail("cudaMalloc@0 wait 0.4")
    job("grown = threading.Thread(target=lambda: torch.empty(1 << 30, dtype=torch.uint8, device='cuda'))")
    took_s = job(
        "began = time.monotonic(); grown.start(); longest = 0\n"
        "while grown.is_alive():\n"
        "    asked = time.monotonic(); torch.cuda.memory_stats(); longest = max(longest, time.monotonic() - asked)\n"
        "[time.monotonic() - began, longest]"
    )
    rig.fail()
    assert took_s[0] >= 0.4
    assert took_s[1] >= 0.2
    job("torch.cuda.empty_cache()")


def test_a_driver_that_refuses_is_an_out_of_memory_error(plain):
    rig, job = plain
    rig.fail("cudaMalloc@1 OUT_OF_MEMORY")
    with pytest.raises(JobError, match="CUDA out of memory") as raised:
        job("torch.empty(1 << 30, dtype=torch.uint8, device='cuda:1')")
    assert raised.value.type_name == "OutOfMemoryError"
    assert job("torch.empty(1 << 30, dtype=torch.uint8, device='cuda:0').numel()") == GIB
    rig.fail()
    job("torch.cuda.empty_cache()")


def test_memory_that_the_driver_keeps_in_a_pool(rig):
    with rig.shell({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}) as job:
        job("held = torch.empty(100 << 20, dtype=torch.uint8, device='cuda')")
        assert holding(rig, job) == 128 * MIB
        assert job("torch.cuda.memory_allocated(), torch.cuda.memory_reserved()") == [100 * MIB, 128 * MIB]
        job("del held")
        assert job("torch.cuda.memory_allocated(), torch.cuda.memory_reserved()") == [0, 128 * MIB]
        job("torch.cuda.empty_cache()")
        assert holding(rig, job) == 0
        with pytest.raises(JobError, match="Allocation on device 0 would exceed allowed memory"):
            job("torch.empty(30 << 30, dtype=torch.uint8, device='cuda')")


def test_an_allocator_that_is_plugged_in(rig):
    library = rig.natives / "libgpuless-pluggable.so"
    with rig.shell() as job:
        job(
            f"plugged = torch.cuda.memory.CUDAPluggableAllocator({str(library)!r}, 'gpuless_malloc', 'gpuless_free')\n"
            "torch.cuda.memory.change_current_allocator(plugged)\n"
            "held = torch.empty(3 << 20, dtype=torch.uint8, device='cuda')"
        )
        assert job("torch.cuda.get_allocator_backend()") == "pluggable"
        assert holding(rig, job) == 4 * MIB
        job("del held")
        assert holding(rig, job) == 0


def test_no_caching_at_all(rig):
    with rig.shell({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}) as job:
        job("held = torch.empty(3 << 20, dtype=torch.uint8, device='cuda')")
        assert holding(rig, job) == 4 * MIB
        assert job("torch.cuda.memory_reserved()") == 0


def test_expandable_segments_hold_what_is_mapped(rig):
    with rig.shell({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as job:
        job("held = torch.empty(50 << 20, dtype=torch.uint8, device='cuda')")
        assert holding(rig, job) == 60 * MIB
        rig.fail("cuMemCreate OUT_OF_MEMORY")
        with pytest.raises(JobError, match="CUDA out of memory"):
            job("torch.empty(50 << 20, dtype=torch.uint8, device='cuda')")
        rig.fail()
        assert holding(rig, job) == 60 * MIB
        job("del held; torch.cuda.empty_cache()")
        assert holding(rig, job) == 0
