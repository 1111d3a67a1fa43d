"""Which devices CUDA shows a process: as CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER say, and by the names that NVML has for them."""

import pytest

from tests.gpuless.rig import GIB, Device, Instance, Rig

THREE = [Device(cuda_rank=2), Device(cuda_rank=0), Device(cuda_rank=1)]
UUIDS = [
    "GPU-78ece663-43a8-5182-beaa-3b416c67fe95",
    "GPU-907f2a25-630b-5b6e-a446-fb828781ec84",
    "GPU-2fd1997d-d7b7-5350-bde1-9c6ef5011ef3",
]
WITH_MIG = [Device(), Device(instances=[Instance(5 * GIB, "MIG-aaaa"), Instance(10 * GIB, "MIG-bbbb")])]

BUSES = """
runtime = ctypes.CDLL(None)
count = ctypes.c_int()
status = runtime.cudaGetDeviceCount(ctypes.byref(count))
def bus(ordinal):
    text = ctypes.create_string_buffer(32)
    assert runtime.cudaDeviceGetPCIBusId(text, 32, ordinal) == 0
    return int(text.value.split(b":")[1], 16)
[bus(ordinal) for ordinal in range(count.value)]
"""
TOTALS = """
free, total = ctypes.c_size_t(), ctypes.c_size_t()
def capacity(ordinal):
    assert runtime.cudaSetDevice(ordinal) == 0 == runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return total.value >> 30
[capacity(ordinal) for ordinal in range(count.value)]
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return Rig(tmp_path_factory.mktemp("three"), THREE)


@pytest.mark.parametrize(
    ("environ", "buses"),
    [
        pytest.param({}, [2, 3, 1], id="CUDA's own order is not that of the buses"),
        pytest.param({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1, 2, 3], id="unless asked for"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "2,0"}, [1, 2], id="by index, in CUDA's order"),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [3, 1], id="or in that of the buses"
        ),
        pytest.param({"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[0]}"}, [3, 1], id="by UUID"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-907f"}, [2], id="by the beginning of a UUID"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, [2], id="what follows a name of nothing is hidden"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, [], id="none"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0,0"}, [], id="none, where one comes twice"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-dead"}, [], id="none of an unknown UUID"),
    ],
)
def test_a_process_is_shown_devices(three, environ, buses):
    with three.shell(environ, module="ctypes") as process:
        assert process(BUSES) == buses
        assert process("status") == (0 if buses else 100)


def test_uuids_are_told_apart_and_stay_the_same(three):
    assert [three.uuid(device) for device in range(3)] == UUIDS


def test_torch_tells_the_uuid_and_counts_as_nvml_does(three):
    with three.shell({"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[0]}"}) as job, three.nvml_shell() as nvml:
        assert job("torch.cuda.device_count(), torch.cuda.is_initialized()") == [2, False]
        assert job("f'GPU-{torch.cuda.get_device_properties(1).uuid}'") == UUIDS[0]
        job("x = torch.empty(1 << 20, device='cuda:1')")
        nvml(f"pynvml.nvmlInit(); handle = pynvml.nvmlDeviceGetHandleByUUID({UUIDS[0]!r})")
        assert nvml("[p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]") == [job.pid]
    assert three.holders(2) == {}


@pytest.mark.parametrize(
    ("visible", "capacities"),
    [("MIG-bbbb", [10]), ("MIG-aaaa,MIG-bbbb", [5]), ("1", [5]), ("0", [24]), (None, [24, 5])],
    ids=[
        "an instance by its name",
        "one instance at most",
        "the first one of a device",
        "a whole device",
        "all that is shown",
    ],
)
def test_an_instance_is_a_device_of_its_own(make_rig, visible, capacities):
    rig = make_rig(WITH_MIG)
    with rig.shell({"CUDA_VISIBLE_DEVICES": visible} if visible else {}, module="ctypes") as process:
        process(BUSES)
        assert process(TOTALS) == capacities


def test_what_an_instance_holds_is_not_its_siblings(make_rig):
    rig = make_rig(WITH_MIG)
    with rig.shell({"CUDA_VISIBLE_DEVICES": "MIG-bbbb"}, module="ctypes") as process:
        process(BUSES + TOTALS)
        assert [set(rig.holders(device)) for device in range(4)] == [set(), set(), set(), {process.pid}]
