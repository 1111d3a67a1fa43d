"""Who holds CUDA's tensors, on the real allocator: what is found adds up to what it says was requested, to the byte."""

from typing import Any

import pytest

from allocscope.model.tensors import HolderKind, TensorKind, TensorReport, growth
from tests.gpuless.rig import MIB, Rig, Shell

PRELUDE = """
import gc
from torch import nn
from allocscope.probe import tensors
cuda = torch.device("cuda")

def report(**options):
    return tensors(**{"time_limit_s": 60, **options}).to_plain()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.register_buffer("scale", torch.ones(1000))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).exp()
        return x

def trained(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.zeros(64, 256, device=cuda)).sum().backward()
        optimizer.step()
    return optimizer

def counters():
    stats = torch.cuda.memory_stats()
    return [stats[key] for key in ("allocation.all.allocated", "allocated_bytes.all.current", "reserved_bytes.all.current",
                                   "num_device_alloc", "num_device_free", "allocated_bytes.all.peak")]
"""
WORKSPACES = "torch._C._cuda_clearCublasWorkspaces()"
"""cuBLAS's, which PyTorch allocates: no tensor of Python's."""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One job for most of these; each gives back what it took."""
    with Rig(tmp_path_factory.mktemp("tensors")).shell() as job:
        job(PRELUDE)
        yield job


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    if "job" in request.fixturenames:
        job = request.getfixturevalue("job")
        job("for name in [n for n in dir() if n.startswith('my_')]: globals().pop(name, None)")
        job(f"gc.collect(); {WORKSPACES}; torch.cuda.empty_cache()")
        assert job("torch.cuda.memory_allocated()") == 0


def report(job: Shell, call: str = "report()") -> TensorReport:
    told = TensorReport.from_plain(job(call))
    assert told.absence is None
    return told


def totals(told: TensorReport) -> dict[TensorKind, int]:
    return {total.kind: total.bytes for total in told.totals}


def device(told: TensorReport) -> tuple[Any, ...]:
    (one,) = told.devices
    return one.found_bytes, one.requested_bytes, one.not_held_bytes


def test_what_is_found_of_a_training_is_what_was_requested_to_the_byte(job):
    job("my_model = Net().to(cuda); my_optimizer = trained(my_model)")
    job("my_losses = [my_model(torch.zeros(64, 256, device=cuda)).sum() for _ in range(5)]")
    workspaces = job(f"before = torch.cuda.memory_stats()['requested_bytes.all.current']; {WORKSPACES}; "
                     "before - torch.cuda.memory_stats()['requested_bytes.all.current']")  # fmt: skip
    assert workspaces > 0
    told = report(job)
    requested = job("torch.cuda.memory_stats()['requested_bytes.all.current']")
    assert device(told) == (requested, requested, 0)
    weights = 3 * (256 * 256 + 256) * 4
    assert totals(told) == {
        TensorKind.PARAMETER: weights,
        TensorKind.BUFFER: 4000,
        TensorKind.GRADIENT: weights,
        TensorKind.OPTIMIZER_STATE: 2 * weights,  # AdamW's steps lie on the CPU
        TensorKind.ACTIVATION: 5
        * 4
        * 64
        * 256
        * 4,  # a step: what goes into each layer, and what comes out of the last
        TensorKind.OTHER: 5 * 4,
        TensorKind.NOT_HELD: 0,
    }
    assert told.complete
    assert told.left_out == ()


def test_what_no_tensor_of_pythons_holds_is_told_as_not_held(job):
    job("my_a = torch.zeros(64, 256, device=cuda); my_b = my_a @ my_a.t()")
    told = report(job)
    found, requested, not_held = device(told)
    assert found == (64 * 256 + 64 * 64) * 4
    assert not_held == requested - found > MIB  # cuBLAS's workspace
    assert totals(told)[TensorKind.NOT_HELD] == not_held
    job(WORKSPACES)
    assert device(report(job))[2] == 0


def test_a_storage_is_told_whole_where_its_block_begins(job):
    job("my_base = torch.zeros(1 << 20, dtype=torch.uint8, device=cuda); my_view = my_base[4096:8192]; del my_base")
    told = report(job)
    (row,) = told.rows
    (address,) = job(
        "[b['address'] for s in torch.cuda.memory_snapshot() for b in s['blocks'] if b['state'] == 'active_allocated']"
    )
    assert (row.bytes, row.address, row.device_index) == (1 << 20, address, 0)
    assert [holder.path for holder in row.holders] == ["my_view"]


def test_a_leak_is_told_with_its_bytes(job):
    job("my_losses = []; my_before = report()")
    job("my_losses += [torch.zeros(1 << 20, device=cuda) for _ in range(50)]")
    before, after = TensorReport.from_plain(job("my_before")), report(job)
    (grown,) = growth(before, after)
    assert grown.text == "my_losses[*] (1048576 float32): +50 tensors, +200.00 MiB"


def test_a_report_asks_nothing_of_the_device(job):
    job("my_model = Net().to(cuda); my_optimizer = trained(my_model)")
    assert job("before = counters(); report(); before == counters()")


def test_a_block_that_waits_for_another_stream_is_not_missed(job):
    job(
        "import ctypes; runtime = ctypes.CDLL(None); runtime.gpuless_events_pending(1); my_stream = torch.cuda.Stream()"
    )
    job("my_kept = torch.zeros(1000, device=cuda); my_freed = torch.zeros(5000, device=cuda)")
    job("my_freed.record_stream(my_stream); del my_freed")
    found, requested, not_held = device(report(job))
    assert (found, not_held) == (4000, 0)
    assert 4000 - 1024 <= requested <= 4000  # known but for the waiting blocks' rounding
    job("runtime.gpuless_events_pending(0); torch.cuda.synchronize()")
    job("torch.zeros(1, device=cuda)")  # PyTorch looks for what is finished when it allocates


TRAINING = """
import collections, os, threading
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from allocscope.probe import tensors

still, resting, going_on = threading.Event(), threading.Barrier(3), threading.Event()

def train(checkpoints, steps=None):
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(40)]
    model, losses = nn.Sequential(*blocks).to("cuda"), collections.deque(maxlen=4)
    optimizer, step = torch.optim.AdamW(model.parameters()), 0
    while step != steps:
        hidden = model(torch.zeros(8, 64, device="cuda"))
        if checkpoints:
            hidden = checkpoint(lambda x: x.exp() * x, hidden, use_reentrant=step % 2 == 0)
        loss = hidden.square().mean()
        loss.backward(retain_graph=step % 3 == 0)
        if still.is_set() and step > 4:  # one of the losses kept has its graph still, and the gradients are there
            resting.wait()
            return going_on.wait()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        step += 1

train(True, steps=2)
threads = [threading.Thread(target=train, args=(checkpoints,)) for checkpoints in (False, True)]
for thread in threads:
    thread.start()
for number in range(30):
    report = tensors(time_limit_s=1, rest_s=0.0005 * (number % 2))
    assert report.absence is None, report.absence
alive = sum(thread.is_alive() for thread in threads)
still.set()
resting.wait()
kinds = {total.kind.value for total in tensors(time_limit_s=60).totals}
going_on.set()
for thread in threads:
    thread.join()
print(alive, *sorted(kinds & {"activation", "gradient"}), flush=True)
# While Python ends, PyTorch's own backward thread may still let go of what Python made, and abort (pytorch/pytorch#190489).
os._exit(0)
"""


def test_jobs_that_train_in_threads_survive_being_reported_on(rig, tmp_path):
    """Each look at gradients and at what autograd saved finds its moment (tensors_gate), or is left out; at rest none is."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    done = rig.run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 activation gradient\n", "")


# at an OutOfMemoryError


def test_at_an_oom_in_a_forward_all_of_the_training_is_told_and_the_error_is_the_allocators(job):
    job("""
my_told = []
torch._C._cuda_attach_out_of_memory_observer(lambda *figures: my_told.append(report()) if "my_told" in globals() else None)
my_model = Net().to(cuda)
def my_forward():
    kept = [torch.zeros(1 << 20, device=cuda)]
    hidden = my_model(torch.zeros(64, 256, device=cuda))
    try:
        torch.zeros(1 << 40, dtype=torch.uint8, device=cuda)
    except torch.cuda.OutOfMemoryError as error:
        return str(error)
my_text = my_forward()
""")
    assert job("my_text").startswith("CUDA out of memory. Tried to allocate 1024.00 GiB")
    (plain,) = job("my_told")
    told = TensorReport.from_plain(plain)
    assert (told.absence, told.complete) == (None, True)
    paths = {holder.path for row in told.rows for holder in row.holders}
    assert {"kept[0]", "hidden", "my_model.layers.0.weight"} <= paths
    assert totals(told)[TensorKind.ACTIVATION] == 4 * 64 * 256 * 4  # hidden too: its exp saved it
    assert any(h.kind is HolderKind.AUTOGRAD for row in told.rows for h in row.holders)


def test_at_an_oom_in_a_backward_what_autograd_holds_is_left_alone_and_said_to_be(job):
    job("""
my_told = []
class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros(1 << 40, dtype=torch.uint8, device=cuda)
my_leaf = torch.zeros(1000, device=cuda, requires_grad=True)
my_loss = Greedy.apply(my_leaf.exp()).exp().sum()
try:
    my_loss.backward()
except torch.cuda.OutOfMemoryError:
    my_caught = True
""")
    assert job("my_caught")
    told = TensorReport.from_plain(job("my_told")[0])
    assert "what autograd saved: a backward pass was running, or the job was changing tensors in place" in told.left_out
    paths = {holder.path for row in told.rows for holder in row.holders}
    assert {"my_leaf", "my_loss"} <= paths
    job("my_loss = None")


# other devices, backends, settings


def test_each_device_has_its_own_account(make_rig):
    with make_rig(devices=2).shell() as job:
        job(PRELUDE)
        job("one, two = torch.zeros(1000, device='cuda:0'), torch.zeros(3000, device='cuda:1')")
        told = report(job)
    assert [(d.device_index, d.found_bytes, d.not_held_bytes) for d in told.devices] == [(0, 4000, 0), (1, 12000, 0)]
    assert [(row.device_index, row.holders[0].path) for row in told.rows] == [(1, "two"), (0, "one")]


def test_whatever_the_settings_what_is_found_is_what_was_requested(rig):
    with rig.shell({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:4"}) as job:
        job(PRELUDE)
        job("model = Net().to(cuda); optimizer = trained(model)")
        job("graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph):\n    out = model.scale * 2")
        job(f"gc.collect(); {WORKSPACES}")
        found, requested, not_held = device(report(job))
        assert (found, not_held) == (requested, 0)


def test_where_the_allocator_does_not_count_requests_what_is_found_is_told_alone(rig):
    with rig.shell({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}) as job:
        job(PRELUDE)
        job("kept = torch.zeros(1000, device=cuda)")
        told = report(job)
    assert device(told) == (4000, None, None)
    assert TensorKind.NOT_HELD not in totals(told)


def test_a_report_does_not_initialize_cuda_nor_touch_what_a_forked_child_cannot(rig):
    with rig.shell() as job:
        job(PRELUDE)
        assert job("report()['absence']") == "CUDA is not initialized"
        assert job("torch.cuda.is_initialized()") is False
        assert rig.holders() == {}
        job("import os; kept = torch.zeros(1000, device=cuda)")
        job("""
def absence_of_child():
    child = os.fork()
    if child == 0:
        os._exit(3 if report()["absence"] == "CUDA is not initialized" else 4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
""")
        assert job("absence_of_child()") == 3
