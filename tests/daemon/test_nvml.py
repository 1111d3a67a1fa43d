"""NVML: read whole where it can be, absent where it cannot, and never waited for."""

from __future__ import annotations

import threading

import pytest

from allocscope.daemon.nvml import Nvml, NvmlDevice, NvmlProcess, NvmlRound, NvmlWatch, problems
from tests.daemon.fake_nvml import GIB, FakeDevice, FakeNvml, NVMLError

LOST = NVMLError(15, "GPU is lost")
WAIT_S = 20


def device(uuid="GPU-1", index=0, **changes) -> NvmlDevice:
    known = {"total_bytes": 80 * GIB, "free_bytes": 60 * GIB, "driver_bytes": GIB, "processes": ()}
    return NvmlDevice(uuid, index, "NVIDIA H200", **{**known, **changes})


def test_a_round_reads_every_device_with_its_processes():
    fake = FakeNvml(FakeDevice("GPU-1", processes={7: 3 * GIB, 5: None}), FakeDevice("GPU-2"))
    assert Nvml(fake.load).round() == NvmlRound(
        (device(processes=(NvmlProcess(5, None), NvmlProcess(7, 3 * GIB))), device("GPU-2", 1))
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"reserved": 2**64 - 1}, {"driver_bytes": None}, id="reserved not available"),
        pytest.param({"free": 2**64 - 1}, {"free_bytes": None}, id="free not available"),
        pytest.param({"processes": {7: 2**64 - 1}}, {"processes": (NvmlProcess(7, None),)}, id="use not available"),
        pytest.param(
            {"processes_failure": NVMLError(3, "Not Supported")}, {"processes": None}, id="processes not supported"
        ),
        pytest.param(
            {"memory_failure": NVMLError(3, "Not Supported")},
            {
                "total_bytes": None,
                "free_bytes": None,
                "driver_bytes": None,
                "processes": None,
                "problem": "Not Supported",
            },
            id="memory not supported",
        ),
    ],
)
def test_what_nvml_does_not_tell_is_absent(changes, expected):
    fake = FakeNvml(FakeDevice("GPU-1", **changes), FakeDevice("GPU-2"))
    assert Nvml(fake.load).round().devices == (device(**expected), device("GPU-2", 1))


def test_an_old_driver_tells_memory_without_its_own_part():
    fake = FakeNvml(FakeDevice("GPU-1"))
    fake.has_memory_v2 = False
    assert Nvml(fake.load).round().devices == (device(driver_bytes=None),)


def test_a_device_that_is_lost_keeps_its_name_and_does_not_hide_the_others():
    fake = FakeNvml(FakeDevice("GPU-1"), FakeDevice("GPU-2"))
    nvml = Nvml(fake.load)
    nvml.round()
    fake.devices[0].failure = LOST
    lost = device(free_bytes=None, driver_bytes=None, processes=None, problem="GPU is lost")
    latest = nvml.round()
    assert latest.devices == (lost, device("GPU-2", 1))
    assert list(problems(latest)) == ["device 0 (GPU-1): GPU is lost"]
    fake.devices[0].failure = None
    assert nvml.round().devices == (device(), device("GPU-2", 1))


def test_a_device_that_was_lost_from_the_start_is_passed_over():
    fake = FakeNvml(FakeDevice("GPU-1", failure=LOST), FakeDevice("GPU-2"))
    assert Nvml(fake.load).round().devices == (device("GPU-2", 1),)


def test_a_driver_that_comes_later_is_found():
    fake = FakeNvml(FakeDevice("GPU-1"))
    fake.absent = NVMLError(12, "NVML Shared Library Not Found")
    nvml = Nvml(fake.load)
    assert nvml.round() == NvmlRound(problem="NVML cannot be read: NVML Shared Library Not Found")
    fake.absent = None
    assert nvml.round() == NvmlRound((device(),))


def test_no_binding_at_all_is_a_problem_and_no_more():
    def load():
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert Nvml(load).round() == NvmlRound(problem="NVML cannot be read: No module named 'pynvml'")


class Watched:
    """A watch over a fake, by a clock of the test's."""

    def __init__(self, fake: FakeNvml) -> None:
        self.now_s = 100.0
        self.rounds = 0
        self.changed = threading.Condition()
        self.watch = NvmlWatch(
            Nvml(fake.load),
            interval_s=0.001,
            timeout_s=5,
            retry_s=0.001,
            clock=lambda: self.now_s,
            on_round=self.count,
        )

    def count(self, seconds: float, went_well: bool) -> None:
        with self.changed:
            self.rounds += 1
            self.changed.notify_all()

    def wait_for(self, rounds: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.rounds >= rounds, WAIT_S)


def test_a_call_that_hangs_is_told_of_not_waited_for_not_repeated_and_over_when_it_is_over():
    fake = FakeNvml(FakeDevice("GPU-1"))
    watched = Watched(fake)
    watched.watch.start()
    try:
        watched.wait_for(1)
        assert watched.watch.latest() == NvmlRound((device(),))

        fake.may_answer.clear()
        assert fake.hangs.wait(WAIT_S)
        rounds = watched.rounds
        assert watched.watch.latest() == NvmlRound((device(),)), "it has time left"
        watched.now_s += 7
        problem = "NVML has not answered within 5 s"
        absent = device(free_bytes=None, driver_bytes=None, processes=None, problem=problem)
        assert watched.watch.latest() == NvmlRound((absent,), problem)
        assert watched.rounds == rounds

        fake.may_answer.set()
        watched.wait_for(rounds + 1)
        assert watched.watch.latest() == NvmlRound((device(),))
    finally:
        fake.may_answer.set()
        watched.watch.stop()


def test_a_library_that_is_missing_is_looked_for_again():
    fake = FakeNvml(FakeDevice("GPU-1"))
    fake.absent = NVMLError(12, "NVML Shared Library Not Found")
    watched = Watched(fake)
    watched.watch.start()
    try:
        watched.wait_for(2)
        fake.absent = None
        watched.wait_for(watched.rounds + 2)
        assert watched.watch.latest() == NvmlRound((device(),))
    finally:
        watched.watch.stop()
