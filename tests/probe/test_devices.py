"""A device of CUDA's is known by NVML's UUID, whichever number, order or name of it the job uses; what is not certain is unknown."""

import ctypes
import os
import uuid
from types import SimpleNamespace

import pytest

from allocscope.model import Device
from allocscope.probe import devices
from allocscope.probe.devices import device_uuid, entry_of, name_device, uuid_by_driver
from allocscope.probe.torch_cuda import TorchCuda, look
from tests.probe.fake_torch import GIB, FakeTorch

A = "8932f937-d72c-4106-c12f-20bd9faed9f6"
B = "20bed2f5-819b-69ad-8d42-d3e1446080c1"
PART = "90443af0-2fe6-57fb-86fe-54186d5a6581"
"""A MIG instance's."""
BY_DRIVER = uuid_by_driver


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    """A machine with a GPU runs these tests, too."""
    monkeypatch.setattr(devices, "uuid_by_driver", lambda index: None)


@pytest.mark.parametrize(
    ("visible", "entries"),
    [
        pytest.param(None, [None, None], id="not set"),
        pytest.param("", [None, None], id="empty: no devices"),
        pytest.param("2,1", ["2", "1", None], id="numbers"),
        pytest.param(" 2 , 1", ["2", "1"], id="with spaces"),
        pytest.param("0,2,-1,1", ["0", "2", None, None], id="-1 ends the list"),
        pytest.param("NoDevFiles", [None], id="what container runtimes leave"),
        pytest.param("0,none,1", ["0", None, None], id="a word ends the list"),
        pytest.param("0,,1", ["0", None, None], id="nothing ends the list"),
        pytest.param("1gpu2,+2ampere", ["1", "2"], id="what begins with a number is one"),
        pytest.param("0,1,0", [None, None, None], id="one twice leaves none"),
        pytest.param("0,1,00", [None, None, None], id="one twice in other words"),
        pytest.param("0,-1,0", ["0", None], id="twice, but the second is not heeded"),
        pytest.param(f"GPU-{A},GPU-{B}", [f"GPU-{A}", f"GPU-{B}"], id="UUIDs"),
        pytest.param(f"GPU-{A.upper()}", [f"GPU-{A}"], id="UUIDs in capitals"),
        pytest.param(f"gpu-{A}", [f"GPU-{A}"], id="in small letters"),
        pytest.param("GPU-8932f937", ["GPU-8932f937"], id="a UUID's beginning"),
        pytest.param(f"MIG-{PART}", [f"MIG-{PART}"], id="a MIG instance"),
        pytest.param(f"MIG-GPU-{A}/5/0", [f"MIG-GPU-{A}/5/0"], id="a MIG instance as drivers before R470 call it"),
        pytest.param(f"1,GPU-{A}", ["1", f"GPU-{A}"], id="numbers and UUIDs"),
    ],
)
def test_what_cuda_heeds_of_the_visible_devices(visible, entries):
    assert [entry_of(visible, index) for index in range(len(entries))] == entries


@pytest.mark.parametrize(
    ("found", "name"),
    [
        pytest.param({"by_driver": A}, f"GPU-{A}", id="the driver tells it"),
        pytest.param({"by_driver": A, "by_torch": B, "entry": f"GPU-{B}"}, f"GPU-{A}", id="and knows it best"),
        pytest.param({"by_driver": PART, "is_mig": True}, f"MIG-{PART}", id="the driver tells a MIG instance's"),
        pytest.param(
            {"by_driver": PART, "by_torch": A, "is_mig": True, "entry": f"MIG-GPU-{A}/5/0"}, f"MIG-{PART}",
            id="whatever it is called",
        ),
        pytest.param({"by_torch": A}, f"GPU-{A}", id="torch tells it"),
        pytest.param({"by_torch": f"GPU-{A}"}, f"GPU-{A}", id="with its prefix"),
        pytest.param({"by_torch": A, "entry": "1"}, f"GPU-{A}", id="a number says nothing"),
        pytest.param({"by_torch": A, "entry": f"GPU-{B}"}, f"GPU-{A}", id="the environment was changed since"),
        pytest.param({"by_torch": A, "entry": f"MIG-{PART}"}, f"GPU-{A}", id="and it is no MIG instance"),
        pytest.param({"by_torch": PART, "is_mig": True}, f"MIG-{PART}", id="MIG, nothing asked for"),
        pytest.param({"by_torch": PART, "is_mig": True, "entry": "0"}, f"MIG-{PART}", id="MIG, the first of a GPU"),
        pytest.param({"by_torch": f"MIG-{PART}", "is_mig": True}, f"MIG-{PART}", id="MIG, with its prefix"),
        pytest.param({"by_torch": PART, "is_mig": True, "entry": f"MIG-{PART}"}, f"MIG-{PART}", id="MIG by UUID"),
        pytest.param({"by_torch": A, "is_mig": True, "entry": f"MIG-{PART}"}, f"MIG-{PART}", id="torch tells the GPU's"),
        pytest.param({"by_torch": PART, "is_mig": True, "entry": "MIG-90443af0"}, f"MIG-{PART}", id="MIG by a beginning"),
        pytest.param({"by_torch": A, "is_mig": True, "entry": "MIG-90443af0"}, None, id="and torch tells the GPU's"),
        pytest.param(
            {"by_torch": PART, "is_mig": True, "entry": f"MIG-GPU-{A}/5/0"}, f"MIG-{PART}", id="MIG by its old name"
        ),
        pytest.param(
            {"by_torch": A, "is_mig": True, "entry": f"MIG-GPU-{A}/5/0"}, f"MIG-GPU-{A}/5/0",
            id="and torch tells the GPU's: it is NVML's name, too",
        ),
        pytest.param({"entry": f"GPU-{A}"}, f"GPU-{A}", id="only the environment tells"),
        pytest.param({"entry": f"MIG-{PART}", "is_mig": True}, f"MIG-{PART}", id="of a MIG instance"),
        pytest.param({"entry": f"MIG-GPU-{A}/5/0", "is_mig": True}, f"MIG-GPU-{A}/5/0", id="by its old name"),
        pytest.param({"entry": "GPU-8932f937"}, None, id="a beginning alone is not certain"),
        pytest.param({"entry": "0"}, None, id="a number is CUDA's, not NVML's"),
        pytest.param({}, None, id="nothing is known"),
    ],
)  # fmt: skip
def test_the_name_that_nvml_has_for_it(found, name):
    assert name_device(**{"by_driver": None, "by_torch": None, "is_mig": False, "entry": None, **found}) == name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", f"MIG-{PART}"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", f"MIG-{PART}"),
        ("NVIDIA H200", f"GPU-{PART}"),
        ("MIGHTY", f"GPU-{PART}"),
    ],
)
def test_a_mig_instance_is_known_by_its_models_name(model, name):
    assert device_uuid(SimpleNamespace(uuid=uuid.UUID(PART), name=model), 0, None) == name


@pytest.mark.parametrize("properties", [SimpleNamespace(), SimpleNamespace(uuid=None), SimpleNamespace(uuid="")])
def test_properties_that_tell_nothing(properties):
    assert device_uuid(properties, 0, None) is None
    assert device_uuid(properties, 0, f"GPU-{A}") == f"GPU-{A}"


# in torch


def ready(torch: FakeTorch) -> TorchCuda:
    found = look(torch.modules)
    assert isinstance(found, TorchCuda)
    return found


@pytest.mark.parametrize("order", ["FASTEST_FIRST", "PCI_BUS_ID"])
def test_whatever_order_cuda_has_each_device_is_known_by_its_uuid(monkeypatch, order):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    torch = FakeTorch(devices=2)
    torch.uuids = [B, A]
    assert [ready(torch).device(index) for index in (0, 1)] == [
        Device(f"GPU-{B}", 0, "Fake H200", 80 * GIB),
        Device(f"GPU-{A}", 1, "Fake H200", 80 * GIB),
    ]


# the driver


class FakeDriver:
    """libcuda as far as it is asked."""

    def __init__(self, uuids: list[str], *, refuses: int = 0) -> None:
        self.uuids, self.refuses = uuids, refuses

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 100 + ordinal
        return self.refuses if ordinal < len(self.uuids) else 101

    def cuDeviceGetUuid_v2(self, found, device):
        found[:] = uuid.UUID(self.uuids[device.value - 100]).bytes
        return 0


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        pytest.param(FakeDriver([A, PART]), PART, id="there is one"),
        pytest.param(FakeDriver([A]), None, id="no such device"),
        pytest.param(FakeDriver([A, PART], refuses=3), None, id="not initialised"),
        pytest.param(FakeDriver([A, str(uuid.UUID(int=0))]), None, id="one that tells nothing"),
        pytest.param(SimpleNamespace(cuDeviceGet=lambda device, ordinal: 0), None, id="before CUDA 11.4"),
        pytest.param(SimpleNamespace(), None, id="something else"),
    ],
)
def test_the_driver_that_is_loaded_is_asked(monkeypatch, driver, told):
    asked = []

    def load(name, mode):
        asked.append((name, mode))
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert BY_DRIVER(1) == told
    assert asked == [("libcuda.so.1", os.RTLD_NOW | os.RTLD_NOLOAD)]


def test_no_driver_is_loaded_to_be_asked(monkeypatch):
    monkeypatch.setattr(devices, "DRIVER", "libm.so.6")  # it is there, with no such function; or not loaded
    assert BY_DRIVER(0) is None
    monkeypatch.setattr(devices, "DRIVER", "libno-such-thing.so.1")
    assert BY_DRIVER(0) is None
