"""NVML as the daemon sees it, by the real pynvml: true figures, and each way in which a driver fails to tell them."""

import pytest

from tests.gpuless.rig import GIB, MIB, Device, Instance, JobError, Rig

PRELUDE = """
import time
N = pynvml
def told(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except N.NVMLError as error:
        return f"{type(error).__name__}({error.value})"
def memory(index, version=2):
    info = N.nvmlDeviceGetMemoryInfo(N.nvmlDeviceGetHandleByIndex(index), version=N.nvmlMemory_v2 if version == 2 else None)
    return {name: getattr(info, name) for name in ("total", "reserved", "free", "used") if hasattr(info, name)}
def processes(index):
    found = N.nvmlDeviceGetComputeRunningProcesses(N.nvmlDeviceGetHandleByIndex(index))
    return {process.pid: process.usedGpuMemory for process in found}
N.nvmlInit()
"""
GONE = 4_100_000
"""A pid that no process has (Linux's are below 2^22 = 4,194,304, and this one is not given out here)."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two devices and somebody who looks at them; a process that is not to be found holds 3 GiB of the second."""
    rig = Rig(tmp_path_factory.mktemp("two"), devices=2)
    rig.make_up(GONE, 3 * GIB, device=1)
    with rig.nvml_shell() as nvml:
        nvml(PRELUDE)
        yield rig, nvml


@pytest.fixture
def nvml(two):
    """All is well again after each test."""
    rig, nvml = two
    yield nvml
    rig.fail()


@pytest.fixture
def fail(two):
    return two[0].fail


def test_figures_add_up(nvml):
    assert nvml("memory(1)") == {
        "total": 24 * GIB + 512 * MIB, "reserved": 512 * MIB, "used": 3 * GIB, "free": 21 * GIB,
    }  # fmt: skip
    assert nvml("memory(1, version=1)") == {
        "total": 24 * GIB + 512 * MIB,
        "used": 3 * GIB + 512 * MIB,
        "free": 21 * GIB,
    }
    assert nvml("processes(1)") == {str(GONE): 3 * GIB}
    assert nvml("processes(0)") == {}


def test_devices_have_names_and_places(nvml):
    handle = "N.nvmlDeviceGetHandleByIndex(1)"
    assert nvml("N.nvmlDeviceGetCount()") == 2
    assert nvml(f"N.nvmlDeviceGetName({handle})") == "NVIDIA H100 80GB HBM3 (pretended)"
    assert nvml(f"N.nvmlDeviceGetUUID({handle})") == "GPU-907f2a25-630b-5b6e-a446-fb828781ec84"
    assert nvml(f"N.nvmlDeviceGetPciInfo({handle}).busId") == "00000000:02:00.0"
    assert nvml("N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByPciBusId('0000:02:00.0'))") == 1
    assert nvml(f"N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID(N.nvmlDeviceGetUUID({handle})))") == 1
    assert nvml(f"N.nvmlDeviceGetGraphicsRunningProcesses({handle})") == []
    assert nvml(f"N.nvmlDeviceGetMigMode({handle})") == [0, 0]


@pytest.mark.parametrize(
    ("fault", "asked", "answer"),
    [
        ("nvmlDevice*@1 GPU_IS_LOST", "told(memory, 1)", "NVMLError_GpuIsLost(15)"),
        ("nvmlDevice*@1 GPU_IS_LOST", "told(N.nvmlDeviceGetHandleByIndex, 1)", "NVMLError_GpuIsLost(15)"),
        ("nvmlDevice*@1 GPU_IS_LOST", "told(memory, 0)['used']", 0),
        ("nvmlDevice*@1 GPU_IS_LOST", "told(N.nvmlDeviceGetCount)", 2),
        ("nvmlDeviceGetMemoryInfo NOT_SUPPORTED", "told(memory, 1)", "NVMLError_NotSupported(3)"),
        ("nvmlDeviceGetMemoryInfo NOT_SUPPORTED", "told(processes, 1)", {str(GONE): 3 * GIB}),
        ("nvmlDeviceGetMemoryInfo unavailable", "told(memory, 1)['used']", 2**64 - 1),
        ("nvmlDeviceGetMemoryInfo unavailable", "told(memory, 1, version=1)['total']", 2**64 - 1),
        ("nvmlDeviceGetComputeRunningProcesses unavailable", "told(processes, 1)", {str(GONE): None}),
        ("nvmlDeviceGetComputeRunningProcesses NOT_SUPPORTED", "told(processes, 1)", "NVMLError_NotSupported(3)"),
        ("nvmlDeviceGetComputeRunningProcesses NO_PERMISSION", "told(processes, 1)", "NVMLError_NoPermission(4)"),
        ("nvml* UNKNOWN", "told(N.nvmlDeviceGetCount)", "NVMLError_Unknown(999)"),
        ("nvml* 999", "told(memory, 0)", "NVMLError_Unknown(999)"),
        ("nvmlDevice*@0 RESET_REQUIRED", "told(memory, 0)", "NVMLError_ResetRequired(16)"),
        ("nvmlDeviceGetCount DRIVER_NOT_LOADED", "told(N.nvmlDeviceGetCount)", "NVMLError_DriverNotLoaded(9)"),
    ],
)  # fmt: skip
def test_a_fault_answers_and_passes(nvml, fail, fault, asked, answer):
    well = nvml(asked)
    fail(fault)
    assert nvml(asked) == answer
    fail()
    assert nvml(asked) == well


def test_a_call_that_hangs_goes_on_when_its_time_is_over(nvml, fail):
    fail("nvmlDeviceGetCount wait 0.3")
    assert nvml("began = time.monotonic(); N.nvmlDeviceGetCount(); time.monotonic() - began") >= 0.3


def test_a_call_that_hangs_goes_on_when_the_fault_is_gone(nvml, fail):
    fail("nvmlDeviceGetMemoryInfo@0 wait 3600")
    assert nvml("memory(1)['used']") == 3 * GIB
    nvml.send("memory(0)['used']")
    fail()
    assert nvml.answer() == 0


def test_a_driver_that_is_not_the_librarys_is_not_begun_with(nvml, fail):
    nvml("N.nvmlShutdown()")
    assert nvml("told(N.nvmlDeviceGetCount)") == "NVMLError_Uninitialized(1)"
    fail("nvmlInit LIB_RM_VERSION_MISMATCH")
    assert nvml("told(N.nvmlInit)") == "NVMLError_LibRmVersionMismatch(18)"
    fail()
    assert nvml("N.nvmlInit(); N.nvmlDeviceGetCount()") == 2


def test_faults_may_be_one_processs_own(two):
    rig, _ = two
    with rig.nvml_shell(
        {"GPULESS_FAULTS": "nvmlDeviceGetName@1 NOT_SUPPORTED; nvmlDeviceGetCount NO_PERMISSION"}
    ) as other:
        other(PRELUDE)
        assert other("told(N.nvmlDeviceGetCount)") == "NVMLError_NoPermission(4)"
        names = "[told(N.nvmlDeviceGetName, N.nvmlDeviceGetHandleByIndex(index)) for index in range(2)]"
        assert other(names) == ["NVIDIA H100 80GB HBM3 (pretended)", "NVMLError_NotSupported(3)"]


def test_a_process_that_ended_holds_nothing(two, nvml):
    rig, _ = two
    rig.make_up(GONE - 1, GIB, device=0)
    assert nvml("processes(0), memory(0)['used']") == [{str(GONE - 1): GIB}, GIB]
    rig.make_up(GONE - 1, 0, device=0)
    assert nvml("processes(0), memory(0)['used']") == [{}, 0]


def test_an_old_driver_lacks_the_newer_calls(make_rig):
    rig = make_rig(old_driver=True)
    rig.make_up(GONE, 3 * GIB)
    with rig.nvml_shell() as nvml:
        nvml(PRELUDE)
        assert nvml("told(memory, 0)") == "NVMLError_FunctionNotFound(13)"
        assert nvml("memory(0, version=1)['used']") == 3 * GIB + 512 * MIB
        with pytest.raises(JobError, match="Unversioned function called") as raised:
            nvml("processes(0)")
        assert raised.value.type_name == "NVMLLibraryMismatchError"  # of pynvml's own, and not one of its NVMLErrors
        by_v2 = "N.nvmlDeviceGetComputeRunningProcesses_v2(N.nvmlDeviceGetHandleByIndex(0))"
        assert nvml(f"[(p.pid, p.usedGpuMemory) for p in {by_v2}]") == [[GONE, 3 * GIB]]
        assert nvml("N.nvmlSystemGetDriverVersion()") == "470.256.02"


def test_of_a_device_in_mig_mode_its_instances_tell(make_rig):
    rig = make_rig([Device(instances=[Instance(5 * GIB), Instance(10 * GIB, "MIG-bbbb")])])
    rig.make_up(GONE, 2 * GIB, device=2)
    with rig.nvml_shell() as nvml:
        nvml(
            f"{PRELUDE}whole = N.nvmlDeviceGetHandleByIndex(0); part = N.nvmlDeviceGetMigDeviceHandleByIndex(whole, 1)"
        )
        assert nvml("N.nvmlDeviceGetCount(), N.nvmlDeviceGetMigMode(whole)") == [1, [1, 1]]
        assert nvml("told(memory, 0)") == "NVMLError_NoPermission(4)"
        assert nvml("N.nvmlDeviceGetUUID(part), N.nvmlDeviceGetMemoryInfo(part).used") == ["MIG-bbbb", 2 * GIB]
        assert nvml("N.nvmlDeviceGetGpuInstanceId(part), N.nvmlDeviceIsMigDeviceHandle(part).value") == [2, 1]
        assert nvml("N.nvmlDeviceGetUUID(N.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))") == rig.uuid(0)
        assert nvml("told(N.nvmlDeviceGetMigDeviceHandleByIndex, whole, 2)") == "NVMLError_NotFound(6)"
        holders = nvml(
            "[(p.pid, p.usedGpuMemory, p.gpuInstanceId) for p in N.nvmlDeviceGetComputeRunningProcesses(whole)]"
        )
        assert holders == [[GONE, 2 * GIB, 2]]


def test_without_a_rig_there_is_no_driver(rig):
    with rig.nvml_shell({"GPULESS_DIR": "/nowhere"}) as nvml, pytest.raises(JobError) as raised:
        nvml("pynvml.nvmlInit()")
    assert raised.value.type_name == "NVMLError_DriverNotLoaded"
