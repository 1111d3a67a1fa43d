"""A job with real tensors, that does as a test says and reports on them; run by a Python that has torch, on the CPU.

    python tensor_job.py < names of the functions below, one a line

Each answers in a line of JSON. Sizes are odd on purpose: a row is found by its bytes.
"""

# ruff: noqa: F841 (a variable that nothing reads is what holds a tensor)
# pyright: reportMissingImports=false

import collections
import functools
import gc
import json
import operator
import os
import sys
import threading
import time
import types
import warnings
import weakref
from collections import Counter
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allocscope.probe import tensors

GLOBAL = torch.zeros(1001)


def report(**options):
    return tensors(**{"time_limit_s": 60, "device_type": "cpu", **options}).to_plain()


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("mask", torch.ones(1103))
        self.kept = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).exp()
        return x


# what there is


def views():
    base = torch.zeros(100, 1009)
    head, tail = base[:1], base[1:].t()
    del base
    return report()


def training():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    model.kept = torch.zeros(1109)
    return report()


class Thing:
    shared: ClassVar = torch.zeros(1201)

    def __init__(self, own):
        self.own = own


class Slotted:
    __slots__ = ("held", "unset")

    def __init__(self, held):
        self.held = held


def fail(tensor):
    raise RuntimeError("kept")


def names():
    numbers = [None, torch.zeros(1203)]
    nested = {"a": [{3: torch.zeros(1205)}]}
    thing, slotted = Thing(torch.zeros(1207)), Slotted(torch.zeros(1209))
    line = collections.deque([torch.zeros(1211)])
    point = types.SimpleNamespace(x=torch.zeros(1213))
    bound = functools.partial(max, torch.zeros(1215))
    captured = torch.zeros(1217)
    unique = {torch.zeros(1219)}
    ordered = collections.OrderedDict(k=torch.zeros(1223))

    def closure():
        return captured

    def generator():
        local = torch.zeros(1221)
        yield local

    running = generator()
    next(running)
    try:
        fail(torch.zeros(1225))
    except RuntimeError as error:
        kept = error
    made = _closure()
    return report()


def _closure():
    alone = torch.zeros(1227)
    return lambda: alone


def leak():
    model, losses = Net(), []
    before = report()
    losses += [model(torch.randn(16, 8)).sum() for _ in range(50)]
    return {"before": before, "after": report()}


# what autograd saved


class Square(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.extra = torch.zeros(1301)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def saved():
    leaf = torch.ones(1303, requires_grad=True)
    loss = Square.apply(leaf.exp()).sum()
    before = report()
    loss.backward()
    return {"before": before, "after": report()}


def hooks():
    unpacked: Counter = Counter()
    recomputed: Counter = Counter()

    def unpack(packed):
        unpacked["seen"] += 1
        return packed[0]

    def unbox(box):
        unpacked["hidden"] += 1
        return box.tensor

    def recompute(x):
        recomputed["runs"] += 1
        return (x.exp() * 2).exp()

    leaf = torch.ones(1307, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.clone(),), unpack):
        seen = leaf.sin()
    with torch.autograd.graph.saved_tensors_hooks(Box, unbox):
        hidden = leaf.cos()
    kept = checkpoint(recompute, leaf, use_reentrant=False)
    return {"report": report(), "unpacked": unpacked.total(), "runs": recomputed.total()}


def nameless():
    """A tensor that lives on as what the next one saved: it has a graph of its own, and no name."""
    leaf = torch.ones(1311, requires_grad=True)
    hidden = leaf * leaf
    loss = hidden.sin().sum()
    del hidden
    return report()


def torch_that_does_not_tell_hooks():
    saved = torch._C._autograd.SavedTensor
    kept, loss = vars(saved)["unpack_hook"], torch.ones(1309, requires_grad=True).exp().sum()
    del saved.unpack_hook
    try:
        return report()
    finally:
        saved.unpack_hook = kept


class Box:
    def __init__(self, tensor):
        self.tensor = tensor.clone()


# what must not be touched


def nothing_changes():
    alive, leaf = torch.zeros(1401), torch.zeros(1403, requires_grad=True)
    loss = (leaf * 2).exp().sum()
    short = torch.zeros(1405)
    ends = weakref.ref(short)
    before = _state(alive, loss)
    report()
    after = _state(alive, loss)
    del short
    died = ends() is None
    grad_is_none = leaf.grad is None
    loss.backward()
    return {"before": before, "after": after, "died": died, "grad_is_none": grad_is_none}


def _state(alive, loss):
    storage = alive.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    node = loss.grad_fn.next_functions[0][0]
    return [sys.getrefcount(alive), uses, sys.getrefcount(loss), sys.getrefcount(node), alive._version, gc.isenabled(),
            gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks), torch.is_grad_enabled(), sys.getswitchinterval(),
            sys.gettrace() is None]  # fmt: skip


def variables_die():
    """A running function lets go of a variable after a report."""
    held = torch.zeros(1407)
    ends = weakref.ref(held)
    report()
    del held
    return ends() is None


def swapped():
    """A parameter becomes another while a report is being made."""
    from allocscope.probe.tensors_pace import Pace
    from allocscope.probe.tensors_scan import Scan
    from allocscope.probe.tensors_torch import TorchObjects

    one, other = (nn.Parameter(torch.zeros(size)) for size in (1439, 1441))
    scan = Scan(TorchObjects(sys.modules, "cpu"), Pace(60))
    scan.run()
    found = {id(one), id(other)} <= scan.catalogue.leaves
    torch.utils.swap_tensors(one, other)
    return [found, one.numel(), other.numel()]


class Trap(BaseException):
    pass


def _touch(*arguments, **options):
    touched.append(sys._getframe(1).f_code.co_name)
    raise Trap


touched: list = []
touch: Any = _touch


class Touchy:
    """Whatever is done with it runs its code."""

    def __init__(self):
        object.__getattribute__(self, "__dict__")["tensor"] = torch.zeros(1409)

    __eq__ = __getattr__ = __getattribute__ = __len__ = __bool__ = __iter__ = __repr__ = __str__ = __contains__ = touch
    __hash__ = touch
    __class__: Any = property(touch)


class TouchyMeta(type):
    __hash__ = __eq__ = __getattribute__ = __instancecheck__ = __subclasscheck__ = touch


class Untouchable(metaclass=TouchyMeta):
    __slots__ = ("tensor",)


class TouchyDict(dict):
    __getitem__ = items = values = keys = get = __iter__ = __len__ = touch


class TouchyList(list):
    __getitem__ = __iter__ = __len__ = index = touch


class TouchyTensor(torch.Tensor):  # type: ignore[misc]
    __torch_function__: Any = classmethod(touch)
    device = shape = dtype = grad = property(touch)


class TouchyKey:
    __repr__ = touch


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """As a DTensor: what has no storage, but holds a tensor that has."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    __torch_dispatch__: Any = classmethod(touch)


class LazyModule(types.ModuleType):
    __getattr__ = touch


def touchy():
    plain, odd = Touchy(), object.__new__(Untouchable)
    type.__getattribute__(Untouchable, "__dict__")["tensor"].__set__(odd, torch.zeros(1411))
    mapping, items = TouchyDict(k=torch.zeros(1413)), TouchyList([torch.zeros(1415)])
    tensor, keyed = torch.zeros(1417).as_subclass(TouchyTensor), {TouchyKey(): torch.zeros(1419)}
    lazy = sys.modules["lazy"] = LazyModule("lazy")
    proxy = weakref.proxy(plain)
    try:
        told = report()
    finally:
        del sys.modules["lazy"]
    return {"report": told, "touched": touched}


def half_made():
    """While C code makes a tuple, of elements some of which are not there yet; it ends while all objects are being gone through."""
    from allocscope.probe.tensors_heap import slices
    from allocscope.probe.tensors_pace import Pace

    told: list = []
    everything: list = []

    def elements():
        yield torch.zeros(1433)
        told.append(report())
        everything.extend(slices(Pace(60), "tensors"))
        yield None

    made = tuple(elements())
    everything.clear()
    return {"report": told[0], "length": len(made)}


def without_storage():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(1))
    del module._parameters["weight"]
    module._parameters["weight"] = Wrapper(torch.zeros(1421))
    sparse, meta, empty = torch.eye(1423).to_sparse(), torch.empty(1425, device="meta"), torch.empty(0)
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(1427)
    told = {}

    def inside(x):
        told["report"] = report()
        return x.sum()

    torch.func.grad(inside)(torch.zeros(1429))
    return {"report": told["report"], "touched": touched}


def nested():
    warnings.simplefilter("ignore")  # it is a prototype, says torch
    held = torch.nested.nested_tensor([torch.zeros(1437), torch.zeros(8)])
    warnings.simplefilter("error")
    return report()


class Counting(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    seen = 0

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        Counting.seen += 1
        return function(*arguments, **(options or {}))


class CountingFunctions(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    seen = 0

    def __torch_function__(self, function, kinds, arguments=(), options=None):
        CountingFunctions.seen += 1
        return function(*arguments, **(options or {}))


def modes():
    held, loss = torch.zeros(1431), torch.ones(1435, requires_grad=True).exp().sum()
    with Counting(), CountingFunctions():
        before = Counting.seen, CountingFunctions.seen
        told = report()
        seen = Counting.seen - before[0], CountingFunctions.seen - before[1]
    return {"report": told, "seen": seen}


# while the job goes on


def backward_running():
    """A thread that waits in a function that calls the engine, as one does that runs a backward."""
    loss = torch.ones(1501, requires_grad=True).exp().sum()
    lock = threading.Lock()
    lock.acquire()
    engine = types.SimpleNamespace(run_backward=lock.acquire)
    thread = threading.Thread(target=_call_engine, args=(engine,))
    thread.start()
    _until(lambda: "_call_engine" in {f.f_code.co_name for f in sys._current_frames().values()})
    during = report()
    lock.release()
    thread.join()
    return {"during": during, "after": report()}


def _call_engine(engine):
    engine.run_backward()


def hook_running():
    """A thread that waits in a hook, which a backward called."""
    leaf = torch.ones(1505, requires_grad=True)
    kept = torch.ones(1507, requires_grad=True).exp()
    lock = threading.Lock()
    lock.acquire()

    def hook(gradient):
        lock.acquire()

    leaf.register_hook(hook)
    thread = threading.Thread(target=lambda: leaf.exp().sum().backward())
    thread.start()
    _until(lambda: "hook" in _running())
    during = report()
    lock.release()
    thread.join()
    return {"during": during, "after": report()}


def collected():
    """Whether, wherever in a look a collection begins, what is let through is what it was when the gate was asked."""
    from allocscope.probe.tensors_gate import BACKWARD, Gate
    from allocscope.probe.tensors_pace import Pace

    gate, pace, thresholds, read = Gate(BACKWARD), Pace(60), gc.get_threshold(), []
    for allocations in range(1, 80):
        gc.collect(0)
        state = _Begins().state
        gc.set_threshold(allocations)
        try:
            read.append(gate.read(state, operator.itemgetter("runs"), pace))
        finally:
            gc.set_threshold(*thresholds)
        gc.collect(0)  # where none began
        state["lock"].release()
        state["thread"].join()
    return {"let through": [False] in read, "during": [True] in read}


class _Begins:
    """Has a thread begin a backward once the collector finds it."""

    def __init__(self):
        lock = threading.Lock()
        lock.acquire()
        engine = types.SimpleNamespace(run_backward=lock.acquire)
        thread = threading.Thread(target=_call_engine, args=(engine,))
        self.me = self
        self.state: dict[str, Any] = {"lock": lock, "thread": thread, "runs": False}

    def __del__(self):
        self.state["thread"].start()
        _until(lambda: "_call_engine" in _running())
        self.state["runs"] = True


def _running():
    return {frame.f_code.co_name for frame in sys._current_frames().values()}


def at_gradients():
    """Threads that wait in functions which set gradients: what they free lets go of the lock before the gradient is gone."""
    leaf = torch.ones(1503, requires_grad=True)
    leaf.exp().sum().backward()
    told = {}
    for work, runs in (
        (_set_gradient, "_set_gradient"),
        (_set_gradient_by_name, "_set_gradient_by_name"),
        (_set_watched_gradient, "called"),
    ):
        waiting = threading.Lock()
        waiting.acquire()
        thread = threading.Thread(target=work, args=(torch.ones(1, requires_grad=True), waiting))
        thread.start()
        _until(lambda runs=runs: runs in _running())
        told[work.__name__] = report()
        waiting.release()
        thread.join()
    return {**told, "after": report()}


def _set_gradient(leaf, waiting):
    leaf.grad = None
    waiting.acquire()


def _set_gradient_by_name(leaf, waiting):
    setattr(leaf, "grad", None)  # noqa: B010
    waiting.acquire()


def _set_watched_gradient(leaf, waiting):
    leaf.grad = torch.zeros(1)
    ends = weakref.ref(leaf.grad, _calls(waiting))
    leaf.grad = None


def _calls(waiting):
    def called(reference):
        waiting.acquire()

    return called


def audited():
    """In a child, since an audit hook stays."""
    loss = torch.ones(1509, requires_grad=True).exp().sum()
    child = os.fork()
    if child == 0:
        sys.addaudithook(lambda *event: None)
        told = report()
        kinds = {total["kind"] for total in told["totals"]}
        os._exit(0 if "audit hook" in " ".join(told["left_out"]) and "activation" not in kinds else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def real_backward():
    """Whether the gate sees a real backward of another thread, and its end."""
    from allocscope.probe.tensors_gate import BACKWARD, Gate
    from allocscope.probe.tensors_pace import Pace

    leaf = torch.ones(400, 400, requires_grad=True)
    stop = threading.Event()

    def train():
        while not stop.is_set():
            result = leaf
            for _ in range(20):
                result = result @ leaf
            result.sum().backward()

    thread = threading.Thread(target=train)
    thread.start()
    gate, pace = Gate(BACKWARD), Pace(60)
    saw = [_until(lambda: gate.read(1, abs, pace) is None), _until(lambda: gate.read(1, abs, pace) == [1])]
    stop.set()
    thread.join()
    return [*saw, gate.read(-2, abs, pace)]


def in_place():
    """Whether the gate sees that another thread changes a tensor in place, in each of these ways, and when it does not."""
    from allocscope.probe.tensors_gate import IN_PLACE, Gate
    from allocscope.probe.tensors_pace import Pace

    tensor = torch.zeros(1_000_000)
    gate, pace, saw = Gate(IN_PLACE), Pace(60), {}
    for work in (_by_method, _by_operator, _by_index, _by_function, _by_module, _by_nothing):
        stop = threading.Event()
        thread = threading.Thread(target=_again, args=(work, tensor, stop))
        thread.start()
        if work is _by_nothing:
            _until(lambda: "_by_nothing" in {f.f_code.co_name for f in sys._current_frames().values()})
            saw[work.__name__] = all(gate.read(1, abs, pace) == [1] for _ in range(1000))
        else:
            saw[work.__name__] = _until(lambda: gate.read(1, abs, pace) is None)
        stop.set()
        thread.join()
    return saw


def _again(work, tensor, stop):
    while not stop.is_set():
        work(tensor)


def _by_method(tensor):
    tensor.add_(1)


def _by_operator(tensor):
    tensor += 1


def _by_index(tensor):
    tensor[1:] = 1


def _by_function(tensor):
    operator.iadd(tensor, 1)


def _by_module(tensor):
    nn.functional.relu(tensor, inplace=True)


def _by_nothing(tensor):
    for _ in range(100):
        tensor.exp().__class__.__name__  # noqa: B018


def _until(holds, bound_s=60):
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        if holds():
            return True
    raise TimeoutError


RACE_S = 1.5
"""How long each goes on."""


def races():
    """Looks at tensors while another thread does with them what would crash or stop a look that is not careful. How many looks."""
    works = (_clear_gradients, _clear_watched_gradients, _go_backward, _change_views, _change, _detach, _begin_and_end)
    return {work.__name__: _race(work) for work in works}


def _race(work):
    from allocscope.probe.tensors_graph import Graph
    from allocscope.probe.tensors_pace import Pace
    from allocscope.probe.tensors_scan import Scan
    from allocscope.probe.tensors_torch import TorchObjects

    tensors_of: list = []
    objects, looks = TorchObjects(sys.modules, "cpu"), 0
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(tensors_of, stop))
    thread.start()
    until = time.monotonic() + RACE_S
    while time.monotonic() < until or not tensors_of:
        _Circle()
        pace = Pace(60)
        scan = Scan(objects, pace)
        for tensor in tuple(tensors_of):  # it changes
            scan.tensor(tensor)
        Graph(objects, scan.catalogue, pace).run()
        for tensor in tuple(tensors_of):
            if id(tensor) in scan.catalogue.leaves:
                scan.gradient_of(tensor)
        looks += 1
    stop.set()
    thread.join()
    return looks


def _clear_gradients(tensors_of, stop):
    leaf = torch.zeros(10, requires_grad=True)
    tensors_of[:] = [leaf]
    while not stop.is_set():
        leaf.grad = torch.zeros(10)
        leaf.grad  # noqa: B018 (Python has seen it)
        leaf.grad = None


def _clear_watched_gradients(tensors_of, stop):
    leaf = torch.zeros(10, requires_grad=True)
    calls: list = []
    tensors_of[:] = [leaf]
    while not stop.is_set():
        gradient = torch.zeros(10)
        watched = weakref.ref(gradient, lambda _: calls.extend(map(abs, range(50))))
        leaf.grad = gradient
        del gradient
        leaf.grad = None


class _Circle:
    """Garbage for the collector, that lets other threads run when it goes."""

    def __init__(self):
        self.me, self.tensor = self, torch.zeros(100)


def _begin_and_end(tensors_of, stop):
    """Threads, of which each end waits for a lock of the interpreter's, with the GIL in its hand."""
    tensors_of[:] = [torch.zeros(10, requires_grad=True) * 1]
    while not stop.is_set():
        threads = [threading.Thread(target=_Circle) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _go_backward(tensors_of, stop):
    leaf = torch.zeros(10, requires_grad=True)
    while not stop.is_set():
        results = [leaf.exp()]
        for _ in range(200):
            results.append(results[-1].exp())
        tensors_of[:] = [*results]
        for result in results[::2]:
            result.grad_fn._saved_result  # noqa: B018 (Python has seen it)
        last = results.pop().sum()
        results.clear()
        last.backward()


def _change_views(tensors_of, stop):
    leaf = torch.zeros(10, requires_grad=True)
    while not stop.is_set():
        base = leaf * 1
        view = base[:5]
        tensors_of[:] = [base, view]
        for _ in range(20):
            base.add_(1)
            view.mul_(2)


def _change(tensors_of, stop):
    leaf = torch.zeros(10, requires_grad=True)
    while not stop.is_set():
        base = leaf * 1
        tensors_of[:] = [base]
        for _ in range(10):
            base.add_(1)
            base *= 2
            base[:2] = 1


def _detach(tensors_of, stop):
    leaf = torch.zeros(10, requires_grad=True)
    while not stop.is_set():
        result = leaf * 1
        tensors_of[:] = [result]
        result.detach_()


def _train(steps, losses):
    torch.manual_seed(1)
    model, cache = Net(), {}
    history: collections.deque = collections.deque(maxlen=10)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        loss = Square.apply(model(torch.randn(4, 8))).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss)
        cache[step % 7] = loss.detach()
        losses.append(loss.item())


def meanwhile():
    """Reports while another thread trains: its results are those of a training without."""
    alone: list = []
    watched: list = []
    reports: list = []
    _train(300, alone)
    thread = threading.Thread(target=_train, args=(300, watched))
    thread.start()
    while thread.is_alive() or not reports:
        reports.append(report(rest_s=0.0005, time_limit_s=2))
    thread.join()
    absences = sorted({told["absence"] for told in reports if "absence" in told})
    return {"same": alone == watched, "reports": len(reports), "absences": absences}


def two_at_once():
    told: list = []
    inside = threading.Event()
    import allocscope.probe.tensors_report as made

    whole = made.report

    def slow(*arguments):
        inside.set()
        _until(lambda: told)
        return whole(*arguments)

    made.report = slow
    try:
        thread = threading.Thread(target=report)
        thread.start()
        inside.wait(60)
        told.append(report())
        thread.join()
    finally:
        made.report = whole
    return told[0]


def forked():
    """A child forked while a thread of its parent makes a report."""
    lock = sys.modules["allocscope.probe.tensors"]._one_at_a_time
    with lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if "absence" not in report(time_limit_s=5) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# bounds


def frozen():
    kept = [torch.zeros(1601)]
    gc.freeze()
    try:
        return report()
    finally:
        gc.unfreeze()


def two_million_objects():
    heap = [(number, [number]) for number in range(1_000_000)]
    told = {}
    for limit_s in (0.1, 60):
        began = time.thread_time()
        told[str(limit_s)] = report(time_limit_s=limit_s)
        told[f"cpu of {limit_s}"] = time.thread_time() - began
    return told


def many():
    kept = [torch.zeros(3) for _ in range(7_000)]
    return report()


def no_time():
    return report(time_limit_s=0)


def no_cuda():
    return tensors().to_plain()


def main():
    warnings.simplefilter("error")  # torch warns of what one should not read of a tensor
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        gc.collect()  # of what the one before left in circles
        print(json.dumps(globals()[line.strip()]()), file=replies, flush=True)


if __name__ == "__main__":
    main()
