"""What is looked at and when, told the time: counters each second, maps under 0.1 % of the time, all at an OOM."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from allocscope.daemon.capture_orders import MOST_ORDERS
from allocscope.model import (
    AllocatorRef,
    BlockMap,
    CaptureOrder,
    Event,
    EventKind,
    Intervals,
    Process,
    Sample,
)
from allocscope.probe import torch_cuda
from allocscope.probe.allocators import Allocators
from allocscope.probe.captures import Moment
from allocscope.probe.clock import Clock
from allocscope.probe.history import History
from allocscope.probe.reports import Reports, Shortage
from allocscope.probe.sampler import Sampler
from allocscope.probe.torch_blocks import WORDS_FOR_STACKS, TorchBlocks
from allocscope.probe.torch_cuda import TorchCuda
from tests.probe.fake_torch import GIB, FakeTorch, runtime_of, segment

PROCESS = Process("a1" * 16, "job", 7, "node", 1, allocator_conf="")
SEGMENTS = [segment(0, (512, 500, "active_allocated")), segment(1, (1024, 900, "active_allocated"))]


@dataclass
class FakeUplink:
    """Keeps what it is handed."""

    sequence: int = 0
    handed: list = field(default_factory=list)
    processes: list = field(default_factory=list)

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def introduce(self, process: Process) -> None:
        self.processes.append(process)

    def sample(self, ref: AllocatorRef, sample: Sample) -> None:
        self.handed.append((ref.device_uuid, sample))

    def block_map(self, ref: AllocatorRef, block_map: BlockMap) -> None:
        self.handed.append((ref.device_uuid, block_map))

    def event(self, event: Event) -> None:
        self.handed.append((event.device_uuid, event))

    def of(self, kind: type) -> list:
        return [thing for _, thing in self.handed if isinstance(thing, kind)]


@dataclass
class FakeCaptures:
    """Keeps what it is told; the next capture is due when a test says."""

    moments: list[Moment] = field(default_factory=list)
    orders: list[CaptureOrder] = field(default_factory=list)
    due_s: float = math.inf
    steps: int = 0
    closed: bool = False
    overtaken: list[CaptureOrder] = field(default_factory=list)
    """Orders that nobody looked at before the end."""

    def on_oom(self, moment: Moment) -> None:
        self.moments.append(moment)

    def order(self, order: CaptureOrder) -> None:
        self.orders.append(order)

    def step(self) -> float:
        self.steps += 1
        return self.due_s

    def close(self, orders: Iterable[CaptureOrder] = ()) -> None:
        self.closed = True
        self.overtaken = list(orders)


class Time:
    """Moves only when it is told to, or when a call of torch's is said to cost some."""

    def __init__(self) -> None:
        self.now_s, self.chance = 100.0, 0.5
        self.costs: dict[str, float] = {}

    def clock(self) -> Clock:
        return Clock(wall_us=lambda: int(self.now_s * 1e6), seconds=lambda: self.now_s, chance=lambda: self.chance)

    def on_call(self, name: str) -> None:
        self.now_s += self.costs.get(name, 0)


@pytest.fixture(autouse=True)
def runtime(monkeypatch):
    monkeypatch.setattr(torch_cuda, "loaded_runtime", runtime_of)


class Rig:
    """A sampler on a fake torch, in told time."""

    def __init__(self, backend: str = "native", **torch) -> None:
        self.torch, self.uplink, self.time = FakeTorch(**torch), FakeUplink(), Time()
        self.torch.backend = backend
        self.torch.segments = SEGMENTS
        self.torch.on_call = self.time.on_call
        self.captures, clock = FakeCaptures(), self.time.clock()
        cuda, uplink, captures = TorchCuda(self.torch.modules), cast("Any", self.uplink), cast("Any", self.captures)
        allocators, reports = Allocators(cuda, uplink, PROCESS, {}), Reports(cuda, uplink, PROCESS.process_id, clock)
        blocks, history = TorchBlocks(self.torch.modules, cuda.backend), History(self.torch.modules)
        self.sampler = Sampler(cuda, blocks, history, allocators, reports, captures, clock)

    def run(self, seconds: float) -> None:
        end = self.time.now_s + seconds
        while self.time.now_s < end - 1e-9:
            pause_s = self.sampler.step()  # which itself may take time
            self.time.now_s += pause_s

    def oom(self, index: int, *figures: int) -> None:
        self.sampler.on_oom(index, Shortage(*figures))

    def map_times(self) -> list[float]:
        return [round(m.time_us / 1e6 - 100, 3) for m in self.uplink.of(BlockMap)]


def test_each_second_a_sample_of_what_torch_and_the_driver_say():
    rig = Rig()
    rig.torch.figures[0] = {"allocated_bytes": 5, "reserved_bytes": 9}
    rig.run(3)
    samples = rig.uplink.of(Sample)
    assert [s.time_us for s in samples] == [100_000_000, 101_000_000, 102_000_000]
    assert {(s.allocated_bytes, s.reserved_bytes) for s in samples} == {(5, 9)}
    assert {(s.device_free_bytes, s.device_total_bytes) for s in samples} == {(70 * GIB, 80 * GIB)}


def test_everything_is_numbered_once_and_in_order():
    rig = Rig(devices=2)
    rig.torch.figures[1] = {"reserved_bytes": 5}
    rig.run(30)
    assert [thing.sequence for _, thing in rig.uplink.handed] == list(range(1, len(rig.uplink.handed) + 1))


def test_the_call_is_timed():
    rig = Rig()
    rig.run(1)
    rig.time.costs = {"stats(0)": 0.000_25}
    rig.run(1)
    assert [s.call_us for s in rig.uplink.of(Sample)] == [0, 250]


def test_unused_devices_are_left_alone_until_they_are_used():
    """The driver is never asked about them: that would make a context there."""
    rig = Rig(devices=3)
    rig.torch.figures = [
        {"reserved_bytes": 0, "allocation": -2},
        {"reserved_bytes": 5},
        {"reserved_bytes": 0, "allocation": -2},
    ]
    rig.run(12)
    assert {uuid for uuid, _ in rig.uplink.handed} == {"GPU-11111111"}
    assert not {"memory_info(0)", "memory_info(2)"} & set(rig.torch.calls)
    rig.torch.figures[2] = {"reserved_bytes": 5}
    rig.run(11)
    assert [[d.index for d in p.devices] for p in rig.uplink.processes] == [[1], [1, 2]]
    assert {uuid for uuid, _ in rig.uplink.handed} == {"GPU-11111111", "GPU-22222222"}


def test_a_device_without_a_uuid_is_left_out():
    rig = Rig(version=(2, 3))
    rig.run(30)
    assert (rig.uplink.handed, rig.uplink.processes) == ([], [])
    assert rig.torch.calls.count("properties") == 1


def test_a_round_that_costs_much_is_followed_by_a_longer_pause():
    rig = Rig()
    rig.time.costs = {"stats(0)": 0.04}
    rig.run(30)
    first, second, third = (s.time_us / 1e6 for s in rig.uplink.of(Sample)[:3])
    assert second - first >= 4
    assert third - second == pytest.approx(4.04)


def test_a_stall_does_not_blind_for_long():
    rig = Rig()
    rig.run(2)
    rig.time.costs = {"stats(0)": 3.0}
    rig.run(25)
    *_, stalled, next_one = rig.uplink.of(Sample)
    assert (stalled.call_us, next_one.time_us - stalled.time_us) == (3_000_000, 13_000_000)


def test_a_slow_driver_is_asked_seldom_and_the_rest_goes_on():
    rig = Rig()
    rig.time.costs = {"memory_info(0)": 0.2}
    rig.run(60)
    known = [s.device_free_bytes is not None for s in rig.uplink.of(Sample)]
    assert known[:12] == [True] + [False] * 9 + [True] + [False]


def test_a_map_every_ten_seconds_or_so():
    rig = Rig()
    rig.run(100)
    assert rig.map_times() == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    group = rig.uplink.of(BlockMap)[0].groups[0]
    assert (group.requested_bytes, group.reserved_bytes) == (500, 512)


@pytest.mark.parametrize(("chance", "times"), [(0.0, [0, 6, 12, 18]), (0.999999, [0, 14])])
def test_the_moment_of_a_map_is_jittered(chance, times):
    rig = Rig()
    rig.time.chance = chance
    rig.run(20)
    assert rig.map_times() == times


def test_maps_of_all_devices_come_from_one_snapshot():
    rig = Rig(devices=2)
    rig.torch.figures[1] = {"reserved_bytes": 5}
    rig.run(11)
    assert rig.torch.calls.count("snapshot") == 2
    assert [(u, t.groups[0].reserved_bytes) for u, t in rig.uplink.handed if isinstance(t, BlockMap)] == [
        ("GPU-00000000", 512), ("GPU-11111111", 1024), ("GPU-00000000", 512), ("GPU-11111111", 1024),
    ]  # fmt: skip


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_maps_stay_under_a_thousandth_of_the_time(chance):
    rig = Rig()
    rig.time.costs, rig.time.chance = {"snapshot": 0.1}, chance
    rig.run(2000)
    assert 0 < rig.torch.calls.count("snapshot") * 0.1 <= 2000 / 1000 + 0.1


@pytest.mark.parametrize("counter", ["num_alloc_retries", "num_sync_all_streams"])
def test_a_flush_brings_a_map_soon(counter):
    rig = Rig()
    rig.run(3)
    rig.torch.figures[0] = {counter: 1}
    rig.run(4)
    assert rig.map_times() == [0, 3]


def test_flushes_without_end_do_not_bring_maps_without_end():
    rig = Rig()
    rig.time.costs = {"snapshot": 0.005}
    for flushes in range(100):
        rig.torch.figures[0] = {"num_alloc_retries": flushes}
        rig.run(1)
    assert 100 / 5 - 4 <= len(rig.map_times()) <= 100 / 5 + 1


def test_counters_that_go_backwards_bring_nothing():
    rig = Rig()
    rig.torch.figures[0] = {"num_alloc_retries": 5}
    rig.run(3)
    rig.torch.figures[0] = {"num_alloc_retries": 0}
    rig.run(3)
    assert rig.map_times() == [0]


def test_calls_that_fail_cost_only_what_they_would_have_said():
    rig = Rig()
    rig.run(1)
    rig.torch.fails = {"stats(0)": RuntimeError("x")}
    rig.run(3)
    rig.torch.fails = {"snapshot": RuntimeError("x"), "memory_info(0)": RuntimeError("x")}
    rig.run(10)
    assert [s.device_free_bytes for s in rig.uplink.of(Sample)[1:]] == [None] * 10
    assert rig.map_times() == [0]


def test_settings_changed_while_it_runs_are_told():
    rig = Rig()
    rig.run(5)
    rig.torch.conf, rig.torch.fractions = "expandable_segments:True", [0.5]
    rig.run(20)
    told = rig.uplink.processes[-1]
    assert (told.allocator_conf, told.devices[0].allowed_bytes) == ("expandable_segments:True", 40 * GIB)
    assert len(rig.uplink.processes) == 2


def test_orders_change_the_intervals_within_bounds():
    rig = Rig()
    rig.run(1)
    rig.sampler.obey(Intervals(sample_us=500_000, block_map_us=4_000_000))
    rig.run(10)
    assert len(rig.uplink.of(Sample)) == 1 + 20
    rig.sampler.obey(Intervals(sample_us=1))
    assert rig.sampler.step() == pytest.approx(0.1)
    rig.sampler.obey(Intervals(sample_us=2**60, block_map_us=2**60))
    rig.run(3601)
    assert [b.time_us - a.time_us for a, b in pairwise(rig.uplink.of(Sample))][-1] == 3_600_000_000


def test_shorter_intervals_hold_at_once():
    rig = Rig()
    rig.sampler.step()
    rig.sampler.obey(Intervals(sample_us=60_000_000, block_map_us=60_000_000))
    rig.sampler.step()
    rig.time.now_s += 1
    rig.sampler.obey(Intervals(sample_us=2_000_000, block_map_us=3_000_000))
    rig.run(5)
    assert [s.time_us / 1e6 for s in rig.uplink.of(Sample)] == [100, 102, 104]
    assert rig.map_times() == [0, 3]


def test_all_orders_that_a_daemon_may_keep_are_followed_at_once():
    rig = Rig()
    orders = [CaptureOrder(f"{number:032x}") for number in range(MOST_ORDERS)]
    for order in orders:
        rig.sampler.obey(order)
    rig.sampler.step()
    assert rig.captures.orders == orders


def test_a_capture_is_ordered_by_the_thread_that_samples():
    rig = Rig()
    order = CaptureOrder("c" * 32)
    rig.sampler.obey(order)
    assert rig.captures.orders == []
    rig.sampler.step()
    assert rig.captures.orders == [order]


def test_a_capture_that_is_due_comes_between_samples_and_costs_none():
    rig = Rig()
    rig.run(3)
    rig.captures.due_s = rig.time.now_s + 0.25
    assert rig.sampler.step() == pytest.approx(0.25)
    rig.time.now_s += 0.25
    rig.captures.due_s = math.inf
    assert rig.sampler.step() == pytest.approx(0.75)
    rig.time.now_s += 5  # a capture that took so long
    rig.sampler.step()
    rig.sampler.step()
    assert [s.time_us / 1e6 for s in rig.uplink.of(Sample)] == [100, 101, 102, 103, 108.25]


# while the program records a history


def test_while_the_program_records_a_history_maps_are_few():
    """Each leaves an entry in it."""
    rig = Rig()
    rig.torch.modules[WORDS_FOR_STACKS] = SimpleNamespace()
    rig.torch.history = {"enabled": "all"}
    for retries in range(250):
        rig.torch.figures[0] = {"num_alloc_retries": retries}
        rig.run(1)
    assert rig.map_times() == [0, 60, 120, 180, 240]
    rig.torch.history = None
    rig.run(150)
    assert len(rig.map_times()) > 10


@pytest.mark.parametrize("version", [(2, 14), (2, 9)], ids=["the compiler", "a whole history"])
def test_no_map_is_worth_importing_the_compiler_or_copying_a_whole_history(version):
    """Which telling of blocks comes to once there are stacks, even of a history that is over."""
    rig = Rig(version=version)
    rig.run(15)
    if version < (2, 11):
        rig.torch.modules[WORDS_FOR_STACKS] = SimpleNamespace()
    rig.torch.history = {"enabled": "all"}
    rig.run(1)
    rig.torch.history = None
    rig.run(100)
    assert rig.map_times() == [0, 10]
    rig.oom(0, 1, 2, 3)
    assert rig.captures.moments[-1].block_map is None
    assert len(rig.uplink.of(BlockMap)) == 2


def test_a_map_that_was_left_out_at_an_oom_is_made_of_the_snapshot_that_is_taken():
    rig = Rig()
    rig.torch.history = {"enabled": "all"}
    rig.run(3)
    rig.oom(0, 1, 2, 3)
    [moment] = rig.captures.moments
    assert moment.map_of is not None
    assert moment.map_of(SEGMENTS) == rig.uplink.of(BlockMap)[-1]
    assert rig.uplink.of(BlockMap)[-1].groups[0].reserved_bytes == 512


# other backends


def test_of_the_drivers_allocator_come_samples_and_no_maps():
    rig = Rig(backend="cudaMallocAsync")
    rig.torch.figures[0] = {"reserved_bytes": 9}
    rig.run(30)
    assert {(s.reserved_bytes, s.requested_bytes, s.num_ooms) for s in rig.uplink.of(Sample)} == {(9, None, None)}
    assert (len(rig.uplink.of(Sample)), rig.uplink.of(BlockMap)) == (30, [])


def test_of_a_pluggable_allocator_only_its_devices_are_told():
    rig = Rig(backend="pluggable", devices=2)
    rig.run(3)
    rig.torch.contexts = {1}
    rig.run(30)
    assert [[d.index for d in p.devices] for p in rig.uplink.processes] == [[1]]
    assert rig.uplink.handed == []


def test_with_caching_off_nothing_is_counted_until_it_is_on_again():
    """The counters would all be 0, of an allocator that is not used."""
    rig = Rig()
    rig.torch.is_caching, rig.torch.contexts = False, {0}
    rig.torch.figures[0] = {"reserved_bytes": 0, "allocation": -2}
    rig.run(3)
    assert [[d.index for d in p.devices] for p in rig.uplink.processes] == [[0]]
    assert rig.uplink.handed == []
    rig.torch.figures[0] = {"reserved_bytes": 5}
    rig.run(1)
    assert [s.reserved_bytes for s in rig.uplink.of(Sample)] == [5]


# out of memory


def test_an_oom_brings_counters_a_map_and_the_event():
    rig = Rig()
    rig.run(3)
    before = len(rig.uplink.handed)
    rig.torch.figures[0] = {"num_ooms": 1}
    rig.oom(0, 20 << 20, 80 * GIB, 5)
    sample, block_map, event = (thing for _, thing in rig.uplink.handed[before:])
    assert sample.num_ooms == 1
    assert block_map.groups[0].reserved_bytes == 512
    assert event == Event(
        PROCESS.process_id, event.sequence, 103_000_000, EventKind.OOM,
        device_uuid="GPU-00000000", requested_bytes=20 << 20, device_total_bytes=80 * GIB, device_free_bytes=5,
    )  # fmt: skip


def test_the_driver_is_not_asked_on_the_thread_that_runs_out():
    rig = Rig()
    rig.oom(0, 1, 2, 3)
    assert "memory_info(0)" not in rig.torch.calls


def test_an_oom_before_the_first_sample_is_told_too():
    rig = Rig(devices=2)
    rig.torch.figures[1] = {"reserved_bytes": 0, "allocation": -2}
    rig.oom(1, 1, 2, 3)
    assert [e.device_uuid for e in rig.uplink.of(Event)] == ["GPU-11111111"]
    assert [[d.index for d in p.devices] for p in rig.uplink.processes] == [[1]]


def test_a_program_that_catches_many_ooms_pays_for_few_maps():
    rig = Rig()
    rig.run(1)
    for _ in range(50):
        rig.oom(0, 1, 2, 3)
        rig.time.now_s += 0.1
    assert len(rig.uplink.of(Event)) == 50
    assert rig.torch.calls.count("snapshot") == 1 + 3


@pytest.mark.parametrize("error", [RuntimeError("x"), MemoryError()], ids=["torch fails", "the machine is full"])
def test_an_oom_is_told_even_where_nothing_else_can_be(error):
    rig = Rig()
    rig.run(1)
    rig.torch.fails = dict.fromkeys(("stats(0)", "snapshot"), error)
    rig.oom(0, 1, 2, 3)
    assert len(rig.uplink.of(Event)) == 1


def test_the_end_is_told_once():
    rig = Rig()
    rig.run(1)
    order = CaptureOrder("0c" * 16)
    rig.sampler.obey(Intervals(sample_us=1_000_000))
    rig.sampler.obey(order)
    rig.sampler.close()
    rig.sampler.close()
    assert (rig.captures.closed, rig.captures.overtaken) == (True, [order])
    assert [event.kind for event in rig.uplink.of(Event)] == [EventKind.STOPPED]
