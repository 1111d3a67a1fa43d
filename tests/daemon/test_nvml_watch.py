"""NVML is read without anybody waiting for it: what hangs has no figures and holds nothing up, and all is as before when it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from allocscope.daemon.nvml import Nvml, NvmlRound
from allocscope.daemon.nvml_problems import NvmlProblem, ProblemKind
from allocscope.daemon.nvml_watch import NvmlWatch
from tests.daemon.fake_nvml import GIB, PATIENCE_S, FakeDevice, FakeNvml, NVMLError
from tests.e2e.processes import until

HANGS = NvmlProblem(ProblemKind.HANGS, "NVML has not answered within 5 s")


class Watched:
    """A watch over a fake, by a clock of the test's."""

    def __init__(self, fake: FakeNvml) -> None:
        self.now_s = 100.0
        self._reads = 0
        self._changed = threading.Condition()
        self.watch = NvmlWatch(
            Nvml(fake.load),
            interval_s=0.001,
            timeout_s=5,
            longest_pause_s=0.001,
            clock=lambda: self.now_s,
            on_read=self._count,
        )

    def later(self, seconds: float) -> NvmlRound:
        """What it tells when so much time is over: who has not answered by then hangs."""
        self.now_s += seconds
        return self.watch.latest()

    def _count(self, seconds: float, went_well: bool) -> None:
        with self._changed:
            self._reads += 1
            self._changed.notify_all()

    def until(self, holds: Callable[[NvmlRound], bool]) -> NvmlRound:
        """What it tells, as soon as this is true of it; it may change with every reading."""
        latest = NvmlRound()

        def held() -> bool:
            nonlocal latest
            latest = self.watch.latest()
            return holds(latest)

        with self._changed:
            assert self._changed.wait_for(held, PATIENCE_S), latest
        return latest


@contextmanager
def watched(fake: FakeNvml) -> Iterator[Watched]:
    """One that reads, and has read all."""
    made = Watched(fake)
    made.watch.start()
    try:
        assert made.watch.wait_until_read(PATIENCE_S)
        yield made
    finally:
        fake.hang.end()
        for device in fake.devices:
            device.hang.end()
        made.watch.stop()


def free(latest: NvmlRound) -> dict[str, int | None]:
    return {device.uuid: device.free_bytes for device in latest.devices}


def kinds(latest: NvmlRound) -> dict[str, str]:
    return {device.uuid: device.problem.kind.value for device in latest.devices if device.problem}


def nvml_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("nvml"))


def test_a_device_that_hangs_has_no_figures_and_does_not_hold_up_the_others():
    fake = FakeNvml(*(FakeDevice(f"GPU-{i}") for i in range(3)))
    with watched(fake) as one:
        fake.devices[1].hang.begin()
        assert fake.devices[1].hang.reached.wait(PATIENCE_S)
        assert free(one.watch.latest()) == {f"GPU-{i}": 60 * GIB for i in range(3)}, "it has time left"
        one.now_s += 7
        fake.devices[0].free, fake.devices[2].free = 50 * GIB, 40 * GIB
        told = one.until(lambda latest: free(latest) == {"GPU-0": 50 * GIB, "GPU-1": None, "GPU-2": 40 * GIB})
        assert kinds(told) == {"GPU-1": "hangs"}
        assert (told.problem, told.devices[1].problem, told.devices[1].total_bytes) == (None, HANGS, 80 * GIB)
        assert nvml_threads() == ["nvml", "nvml-0", "nvml-1", "nvml-2"], "none more for those that hang"

        fake.devices[1].free = 30 * GIB
        fake.devices[1].hang.end()
        told = one.until(lambda latest: free(latest)["GPU-1"] == 30 * GIB)
        assert kinds(told) == {}


def test_where_all_hangs_nothing_is_known_until_it_is_over():
    fake = FakeNvml(FakeDevice("GPU-1"), FakeDevice("GPU-2"))
    with watched(fake) as one:
        fake.hang.begin()
        assert fake.hang.reached.wait(PATIENCE_S)

        def all_hang(latest: NvmlRound) -> bool:
            return latest.problem == HANGS and kinds(latest) == {"GPU-1": "hangs", "GPU-2": "hangs"}

        until(lambda: all_hang(one.later(7)), "all hang, and have for long")
        assert free(one.watch.latest()) == {"GPU-1": None, "GPU-2": None}
        fake.hang.end()
        told = one.until(lambda latest: latest.problem is None and not kinds(latest))
        assert free(told) == {"GPU-1": 60 * GIB, "GPU-2": 60 * GIB}


def test_a_library_that_fails_leaves_no_device_its_figures_and_is_well_again_by_itself():
    fake = FakeNvml(FakeDevice("GPU-1"))
    with watched(fake) as one:
        fake.absent = NVMLError(999)
        told = one.until(lambda latest: latest.problem is not None)
        assert told.problem == NvmlProblem(ProblemKind.UNKNOWN, "Unknown Error")
        assert (free(told), kinds(told)) == ({"GPU-1": None}, {"GPU-1": "unknown"})
        fake.absent = None
        assert free(one.until(lambda latest: latest.problem is None and not kinds(latest))) == {"GPU-1": 60 * GIB}


def test_a_device_that_nvml_lists_no_more_is_missed_until_it_is_back():
    """Its neighbours take its places in NVML's order."""
    devices = [FakeDevice(f"GPU-{i}") for i in range(3)]
    fake = FakeNvml(*devices)
    with watched(fake) as one:
        one.watch.latest()
        fake.devices = [devices[0], devices[2]]
        told = one.until(
            lambda latest: (
                {d.uuid: d.index for d in latest.devices if d.processes is not None} == {"GPU-0": 0, "GPU-2": 1}
            )
        )
        assert free(told) == {"GPU-0": 60 * GIB, "GPU-2": 60 * GIB, "GPU-1": None}
        assert kinds(told) == {"GPU-1": "gone"}
        fake.devices = devices
        assert len(one.until(lambda latest: not kinds(latest)).devices) == 3


def test_of_devices_that_come_by_new_names_without_end_the_last_are_missed_only():
    fake = FakeNvml(FakeDevice("GPU-0"))
    with watched(fake) as one:
        told = one.watch.latest()
        for number in range(150):
            fake.devices = [FakeDevice(f"GPU-{number}")]
            told = one.until(lambda latest: free(latest).get(fake.devices[0].uuid) == 60 * GIB)
    assert set(kinds(told)) == {f"GPU-{number}" for number in range(21, 149)}


def test_instances_that_are_destroyed_are_not_missed():
    whole = FakeDevice("GPU-1", instances=[FakeDevice("MIG-1"), FakeDevice("MIG-2")])
    fake = FakeNvml(whole)
    with watched(fake) as one:
        assert list(free(one.watch.latest())) == ["GPU-1", "MIG-1", "MIG-2"]
        whole.instances = [None, FakeDevice("MIG-2")]
        assert kinds(one.until(lambda latest: list(free(latest)) == ["GPU-1", "MIG-2"])) == {}


@pytest.mark.parametrize("where", ["nvmlInit", "a device"])
def test_who_waits_for_a_first_reading_waits_no_longer_than_he_will(where):
    fake = FakeNvml(FakeDevice("GPU-1"), FakeDevice("GPU-2"))
    hang = fake.hang if where == "nvmlInit" else fake.devices[1].hang
    hang.begin()
    one = Watched(fake)
    one.watch.start()
    try:
        assert hang.reached.wait(PATIENCE_S)
        assert not one.watch.wait_until_read(0.01)
        one.now_s += 7
        told = one.watch.latest()
        if where == "nvmlInit":
            assert told == NvmlRound(problem=HANGS)
        else:
            assert [(d.index, d.uuid, d.problem) for d in told.devices if d.problem] == [(1, "", HANGS)]
    finally:
        hang.end()
        one.watch.stop()
