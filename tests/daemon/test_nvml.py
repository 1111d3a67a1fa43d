"""NVML: read whole where it can be, absent where it cannot, each device for itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.daemon.nvml import Nvml
from allocscope.daemon.nvml_device import NvmlDevice, NvmlProcess
from allocscope.daemon.nvml_problems import LIBRARY, REMEDIES, NvmlProblem, ProblemKind, ProblemNews, problem_of
from tests.daemon.fake_nvml import GIB, FakeDevice, FakeNvml, NVMLError, NVMLLibraryMismatchError

LOST = NVMLError(15, "GPU is lost")
NOT_SUPPORTED = NVMLError(3, "Not Supported")
NO_FIGURES: dict[str, Any] = {"free_bytes": None, "driver_bytes": None}


def device(uuid="GPU-1", index=0, **changes) -> NvmlDevice:
    known = {"total_bytes": 80 * GIB, "free_bytes": 60 * GIB, "driver_bytes": GIB, "processes": ()}
    return NvmlDevice(uuid, index, **{"model": "NVIDIA H200", **known, **changes})


def problem(kind: ProblemKind, text: str) -> NvmlProblem:
    return NvmlProblem(kind, text)


def read(nvml: Nvml) -> tuple[NvmlDevice, ...]:
    """All that there is, after a check."""
    nvml.check()
    return tuple(device for index in range(nvml.count) for device in nvml.read(index))


def test_every_device_is_read_with_its_processes():
    fake = FakeNvml(FakeDevice("GPU-1", processes={7: 3 * GIB, 5: GIB}), FakeDevice("GPU-2"))
    assert read(Nvml(fake.load)) == (
        device(processes=(NvmlProcess(5, GIB), NvmlProcess(7, 3 * GIB))),
        device("GPU-2", 1),
    )


NOT_TOLD = problem(ProblemKind.NOT_AVAILABLE, "the driver does not tell its memory")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"reserved": 2**64 - 1, "used": 0}, {"driver_bytes": None}, id="reserved not available"),
        pytest.param({"free": 2**64 - 1, "used": 0}, {"free_bytes": None}, id="free not available"),
        pytest.param(
            {"total": 2**64 - 1, "free": 2**64 - 1, "reserved": 2**64 - 1},
            {"total_bytes": None, **NO_FIGURES, "problem": NOT_TOLD},
            id="nothing available",
        ),
        pytest.param(
            {"total": 2**63 - 1, "free": 2**63 - 1},
            {"total_bytes": None, **NO_FIGURES, "problem": NOT_TOLD},
            id="a sentinel of 63 bits",
        ),
        pytest.param(
            {"processes": {7: 2**64 - 1}},
            {
                "processes": (NvmlProcess(7, None),),
                "problem": problem(ProblemKind.NO_PROCESS_MEMORY, "what its processes use is not told"),
            },
            id="a process's use not available",
        ),
        pytest.param(
            {"processes_failure": NOT_SUPPORTED},
            {
                "processes": None,
                "problem": problem(ProblemKind.NO_PROCESSES, "who uses it is not told: Not Supported"),
            },
            id="processes not supported",
        ),
        pytest.param(
            {"memory_failure": NOT_SUPPORTED, "processes": {7: GIB}},
            {
                "total_bytes": None,
                **NO_FIGURES,
                "processes": (NvmlProcess(7, GIB),),
                "problem": problem(ProblemKind.NOT_SUPPORTED, "Not Supported"),
            },
            id="memory not supported",
        ),
    ],
)
def test_what_nvml_does_not_tell_is_absent(changes, expected):
    fake = FakeNvml(FakeDevice("GPU-1", **changes), FakeDevice("GPU-2"))
    assert read(Nvml(fake.load)) == (device(**expected), device("GPU-2", 1))


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        pytest.param({"total": 0, "free": 0, "reserved": 0}, None, id="no memory at all"),
        pytest.param({"used": 81 * GIB}, 80 * GIB, id="more used than there is"),
        pytest.param({"free": 80 * GIB, "reserved": GIB, "used": 0}, 80 * GIB, id="more free than there is"),
    ],
)
def test_figures_that_cannot_be_are_left_out(changes, total):
    (told,) = read(Nvml(FakeNvml(FakeDevice("GPU-1", **changes)).load))
    assert (told.total_bytes, told.free_bytes, told.driver_bytes, told.processes) == (total, None, None, ())
    assert told.problem is not None
    assert told.problem.kind is ProblemKind.NONSENSE


def test_an_old_driver_tells_memory_without_its_own_part_and_knows_no_instances():
    fake = FakeNvml(FakeDevice("GPU-1"))
    fake.has_memory_v2 = fake.knows_mig = False
    assert read(Nvml(fake.load)) == (device(driver_bytes=None),)


def test_an_old_driver_tells_processes_by_the_call_that_it_has():
    """pynvml's own error then, which is no NVMLError (nvidia-ml-py 13, throwOnVersionMismatch)."""
    fake = FakeNvml(FakeDevice("GPU-1", processes={7: GIB}))
    fake.has_processes_v3 = False
    assert read(Nvml(fake.load)) == (device(processes=(NvmlProcess(7, GIB),)),)


def test_a_device_that_is_lost_keeps_its_name_and_its_size_and_does_not_hide_the_others():
    fake = FakeNvml(FakeDevice("GPU-1"), FakeDevice("GPU-2"))
    nvml = Nvml(fake.load)
    read(nvml)
    fake.devices[0].failure = LOST
    lost = device(**NO_FIGURES, processes=None, problem=problem(ProblemKind.LOST, "GPU is lost"))
    assert read(nvml) == (lost, device("GPU-2", 1))
    fake.devices[0].failure = None
    assert read(nvml) == (device(), device("GPU-2", 1))


def test_a_device_that_was_lost_from_the_start_is_told_of_without_a_name():
    fake = FakeNvml(FakeDevice("GPU-1", failure=LOST), FakeDevice("GPU-2"))
    lost = NvmlDevice("", 0, processes=None, problem=problem(ProblemKind.LOST, "GPU is lost"))
    assert read(Nvml(fake.load)) == (lost, device("GPU-2", 1))


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode"]
)
def test_an_error_that_is_none_of_nvmls_is_one_devices_trouble(name):
    fake = FakeNvml(FakeDevice("GPU-1"), FakeDevice("GPU-2"))
    nvml, answer = Nvml(fake.load), getattr(fake, name)
    read(nvml)

    def fail_on_the_first(handle, *arguments, **options):
        if handle.uuid == "GPU-1":
            raise ValueError("a structure of another size")
        return answer(handle, *arguments, **options)

    setattr(fake, name, fail_on_the_first)
    first, second = read(nvml)
    assert (first.uuid, second) == ("GPU-1", device("GPU-2", 1))


def instance(uuid: str, **changes) -> FakeDevice:
    known = {"total": 10 * GIB, "free": 9 * GIB, "reserved": 0, "name": "NVIDIA H200 MIG 1g.10gb"}
    return FakeDevice(uuid, **{**known, **changes})


def part(uuid: str, **changes) -> NvmlDevice:
    known = {"model": "NVIDIA H200 MIG 1g.10gb", "total_bytes": 10 * GIB, "free_bytes": 9 * GIB, "driver_bytes": 0}
    return device(uuid, 0, parent_uuid="GPU-1", **{**known, **changes})


WHOLE = NvmlDevice("GPU-1", 0, "NVIDIA H200", in_mig_mode=True)


def test_instances_come_and_go_and_have_figures_of_their_own():
    whole = FakeDevice("GPU-1", memory_failure=NVMLError(4, "Insufficient Permissions"), instances=[])
    fake = FakeNvml(whole, FakeDevice("GPU-2"))
    nvml = Nvml(fake.load)
    assert read(nvml) == (WHOLE, device("GPU-2", 1))
    whole.instances = [instance("MIG-1"), None, instance("MIG-3", processes={7: GIB})]
    assert read(nvml) == (
        WHOLE,
        part("MIG-1"),
        part("MIG-3", processes=(NvmlProcess(7, GIB),)),
        device("GPU-2", 1),
    )
    whole.instances = [None, None, instance("MIG-3")]
    assert read(nvml) == (WHOLE, part("MIG-3"), device("GPU-2", 1))
    whole.instances, whole.memory_failure = None, None
    assert read(nvml) == (device(), device("GPU-2", 1))


def test_a_device_that_goes_into_mig_mode_has_no_bytes_any_more_though_root_may_read_them():
    whole = FakeDevice("GPU-1")
    nvml = Nvml(FakeNvml(whole).load)
    assert read(nvml) == (device(),)
    whole.instances = [instance("MIG-1")]
    assert read(nvml) == (WHOLE, part("MIG-1"))


def test_an_instance_that_cannot_be_read_hides_no_other():
    whole = FakeDevice("GPU-1", instances=[instance("MIG-1", memory_failure=NOT_SUPPORTED), instance("MIG-2")])
    not_supported = problem(ProblemKind.NOT_SUPPORTED, "Not Supported")
    assert read(Nvml(FakeNvml(whole).load)) == (
        WHOLE,
        part("MIG-1", total_bytes=None, **NO_FIGURES, problem=not_supported),
        part("MIG-2"),
    )


def test_a_driver_that_does_not_tell_how_many_instances_there_may_be_is_not_asked_for_each():
    fake = FakeNvml(FakeDevice("GPU-1", instances=[instance("MIG-1")]))
    fake.most_instances = 2**32 - 1
    assert [device.uuid for device in read(Nvml(fake.load))] == ["GPU-1", "MIG-1"]


def test_a_lost_device_loses_its_instances_figures_with_it():
    whole = FakeDevice("GPU-1", instances=[instance("MIG-1")])
    nvml = Nvml(FakeNvml(whole).load)
    read(nvml)
    whole.failure = LOST
    lost = problem(ProblemKind.LOST, "GPU is lost")
    assert read(nvml) == (WHOLE.without_figures(lost), part("MIG-1").without_figures(lost))


@pytest.mark.parametrize("count", [None, "2"])
def test_an_answer_that_makes_no_sense_is_a_problem_of_the_library(count):
    fake = FakeNvml(FakeDevice("GPU-1"))
    nvml = Nvml(fake.load)
    read(nvml)
    setattr(fake, "nvmlDeviceGetCount", lambda: count)  # noqa: B010 (mypy has a method not assigned)
    told = nvml.check()
    assert told is not None
    assert told.kind is ProblemKind.ERROR


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NVMLError(12, "NVML Shared Library Not Found"), "no_library"),
        (NVMLError(9, "Driver Not Loaded"), "no_driver"),
        (NVMLError(18, "RM has detected an NVML/RM version mismatch."), "driver_mismatch"),
        (NVMLError(999), "unknown"),
    ],
)
def test_a_driver_that_comes_later_is_found(error, kind):
    fake = FakeNvml(FakeDevice("GPU-1"))
    fake.absent = error
    nvml = Nvml(fake.load)
    assert nvml.check() == problem(ProblemKind(kind), str(error))
    assert nvml.read(0) == ()
    fake.absent = None
    assert read(nvml) == (device(),)
    assert nvml.problem is None


def test_no_binding_at_all_is_a_problem_and_no_more():
    def load():
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert Nvml(load).check() == problem(ProblemKind.NO_BINDING, "No module named 'pynvml'")


@pytest.mark.parametrize("failing", ["the library", "every device"])
def test_a_library_that_has_become_useless_is_ended_and_begun_with_anew(failing):
    """In a container, after a daemon-reload on the node, every call fails until the devices' files can be opened again."""
    fake = FakeNvml(FakeDevice("GPU-1"))
    nvml = Nvml(fake.load)
    read(nvml)
    if failing == "the library":
        fake.absent = NVMLError(999)
    else:
        fake.devices[0].failure = NVMLError(999)
    read(nvml)
    read(nvml)
    assert nvml.failures >= 1
    fake.absent, fake.devices[0].failure = None, None
    read(nvml)
    assert read(nvml) == (device(),)
    assert (fake.begun, nvml.failures) == (1, 0), "begun with as often as ended, but for once"
    assert fake.inits >= 2


def test_while_it_begins_anew_a_device_is_as_it_was_told_last():
    fake = FakeNvml(FakeDevice("GPU-1", failure=NVMLError(999)))
    nvml = Nvml(fake.load)
    before = read(nvml)
    seen = []
    shut_down = fake.nvmlShutdown

    def look_and_shut_down() -> None:
        seen.append(nvml.read(0))
        shut_down()

    setattr(fake, "nvmlShutdown", look_and_shut_down)  # noqa: B010 (mypy has a method not assigned)
    nvml.check()
    assert seen == [before]


figures = st.integers(0, 2**64 - 1) | st.sampled_from([0, GIB, 80 * GIB, 2**63, 2**64 - 1])


@given(figures, figures, figures, figures, st.lists(figures | st.none(), max_size=3))
def test_whatever_a_driver_tells_what_is_believed_fits_together(total, free, reserved, used, processes):
    told = FakeDevice("GPU-1", total, free, reserved, used, processes=dict(enumerate(processes)))
    (read_,) = read(Nvml(FakeNvml(told).load))
    believed = (read_.total_bytes, read_.free_bytes, read_.driver_bytes)
    assert all(figure is None or 0 <= figure < 2**50 for figure in believed)
    if read_.total_bytes is None:
        assert believed == (None, None, None)
    else:
        assert (read_.free_bytes or 0) + (read_.driver_bytes or 0) <= read_.total_bytes
        assert read_.total_bytes > 0
    assert all(p.used_bytes is None or p.used_bytes < 2**50 for p in read_.processes or ())


def test_one_device_that_fails_is_no_reason_to_begin_anew():
    fake = FakeNvml(FakeDevice("GPU-1", failure=NVMLError(999)), FakeDevice("GPU-2"))
    nvml = Nvml(fake.load)
    read(nvml)
    read(nvml)
    assert (fake.inits, nvml.failures) == (1, 0)


def test_every_kind_of_problem_has_a_remedy():
    assert set(REMEDIES) == set(ProblemKind)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NVMLError(16, "GPU requires reset"), "needs_reset"),
        (NVMLError(4, "Insufficient Permissions"), "no_permission"),
        (NVMLError(17, "The operating system has blocked the request."), "error"),
        (NVMLLibraryMismatchError("Unversioned function called"), "old_driver"),
        (AttributeError("nvmlDeviceGetCount"), "error"),
    ],
)
def test_errors_have_kinds(error, kind):
    assert problem_of(error) == problem(ProblemKind(kind), str(error))


def test_each_problem_is_told_once_and_so_is_its_end():
    news = ProblemNews()
    lost, other_text = (problem(ProblemKind.LOST, text) for text in ("GPU is lost", "lost, it is"))
    hangs = problem(ProblemKind.HANGS, "no answer")
    assert news.step({"device 0": lost}, 0) == ({"device 0": lost}, [])
    assert news.step({"device 0": other_text}, 1) == ({}, [])
    assert news.step({}, 5) == ({}, []), "it may come and go"
    assert news.step({"device 0": lost, "device 1": hangs}, 6) == ({"device 1": hangs}, [])
    assert news.step({LIBRARY: hangs}, 60) == ({LIBRARY: hangs}, []), "nothing is known of the devices"
    assert news.step({"device 1": hangs}, 69) == ({}, ["device 0"])
    assert news.step({}, 80) == ({}, ["device 1", LIBRARY])
    assert news.step({}, 200) == ({}, [])
