"""A real daemon on a driver in trouble, by the real pynvml: what can be told still is, what cannot is absent, and it is over when it is over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.processes import until
from tests.gpuless.node import Node, node
from tests.gpuless.rig import GIB, MIB, Device, Instance, Rig

GONE = 4_100_000
"""A pid that no process has (Linux's are below 2^22 = 4,194,304, and this one is not given out here)."""
CONTEXT = 500 * MIB
DRIVER = 512 * MIB
QUICK = ("--nvml-timeout-s", "0.4", "--interval-s", "0.1")
START = """
from allocscope import probe
probe.start()
held = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
"""


def figures(node: Node, name: str) -> dict[tuple[str, ...], float]:
    """The daemon's series of this name, by the values of `gpu` and `kind` as far as they have them."""
    found = {}
    for labels, value in re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", node.daemon.get("/metrics"), re.MULTILINE):
        told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[tuple(told[key] for key in ("gpu", "kind") if key in told)] = float(value)
    return found


def problems_are(node: Node, expected: dict[tuple[str, str], float], library: str | None = None) -> None:
    """Wait until these are all of the devices' problems, and this is the library's."""

    def told() -> tuple[dict[tuple[str, ...], float], dict[tuple[str, ...], float]]:
        return figures(node, "allocscope_device_problem"), figures(node, "allocscope_nvml_problem")

    wanted = (expected, {(library,): 1.0} if library else {})
    until(lambda: told() == wanted, f"the problems are {wanted}: {told()}")
    assert figures(node, "allocscope_nvml_up") == {(): 0.0 if library else 1.0}


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Node]]:
    """Eight devices of 24 GiB, a daemon and a collector; a process that is not to be found holds 3 GiB of the second device."""
    folder = tmp_path_factory.mktemp("eight")
    rig = Rig(folder, devices=8)
    rig.make_up(GONE, 3 * GIB, device=1)
    with node(rig, folder, *QUICK) as here:
        here.bill_with(rig.uuid(1), {("", "other_processes"): 3 * GIB})
        yield rig, here


@pytest.fixture
def well(eight: tuple[Rig, Node]) -> Iterator[tuple[Rig, Node]]:
    """All is well at the beginning, and again at the end, without a restart."""
    rig, here = eight
    problems_are(here, {})
    yield rig, here
    rig.fail()
    problems_are(here, {})
    here.bill_with(rig.uuid(1), {("", "other_processes"): 3 * GIB, ("", "free"): 21 * GIB, ("", "driver"): DRIVER})


def moves(rig: Rig, node: Node, device: int) -> None:
    """What happens on this device is seen, now."""
    rig.make_up(GONE - 1, 5 * GIB, device)
    node.bill_with(rig.uuid(device), {("", "other_processes"): 5 * GIB, ("", "free"): 19 * GIB})
    rig.make_up(GONE - 1, 0, device)
    node.bill_with(rig.uuid(device), {("", "other_processes"): 0, ("", "free"): 24 * GIB})


def test_the_bill_of_each_device_adds_up_and_an_orphans_bytes_are_other_processes(well):
    rig, here = well
    for device in range(8):
        assert sum(here.bill(rig.uuid(device)).values()) == 24 * GIB + DRIVER
    read = until(
        lambda: next((d for d in here.get("/api/v1/devices")["items"] if d["uuid"] == rig.uuid(1)), None), "it is told"
    )
    assert [(p["pid"], p["used_bytes"], p.get("name")) for p in read["processes"]] == [(GONE, 3 * GIB, None)]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("nvmlDevice*@3 GPU_IS_LOST", "lost"),
        ("nvmlDevice*@3 RESET_REQUIRED", "needs_reset"),
        ("nvmlDeviceGetHandleByIndex@3 NO_PERMISSION", "no_permission"),
        ("nvmlDevice*@3 UNKNOWN", "unknown"),
        ("nvmlDeviceGetMemoryInfo@3 NOT_SUPPORTED", "not_supported"),
        ("nvmlDeviceGetMemoryInfo@3 unavailable", "not_available"),
    ],
)
def test_one_of_eight_that_cannot_be_read_has_no_free_bytes_and_the_others_go_on(well, fault, kind):
    rig, here = well
    rig.fail(fault)
    problems_are(here, {("3", kind): 1})
    moves(rig, here, 7)
    bill = here.bill(rig.uuid(3))
    assert ("", "driver") not in bill, "it was never told, or not now"
    assert sum(bill.values()) == 24 * GIB + DRIVER, "its size is known from before"


def test_a_query_that_hangs_holds_up_no_other_device(well):
    rig, here = well
    rig.fail("nvmlDeviceGetMemoryInfo@3 wait 60", "nvmlDeviceGetUUID@5 wait 60")
    problems_are(here, {("3", "hangs"): 1, ("5", "hangs"): 1})
    moves(rig, here, 0)
    moves(rig, here, 7)


def test_several_that_fail_each_in_a_way_of_its_own_recover_each_by_itself(well):
    rig, here = well
    failing = {
        2: ("nvmlDevice*@2 GPU_IS_LOST", "lost"),
        3: ("nvmlDeviceGetMemoryInfo@3 wait 60", "hangs"),
        4: ("nvmlDeviceGetMemoryInfo@4 unavailable", "not_available"),
        5: ("nvmlDeviceGetComputeRunningProcesses@5 NOT_SUPPORTED", "no_processes"),
        6: ("nvmlDevice*@6 RESET_REQUIRED", "needs_reset"),
    }
    while failing:
        rig.fail(*(fault for fault, _ in failing.values()))
        problems_are(here, {(str(device), kind): 1 for device, (_, kind) in failing.items()})
        moves(rig, here, 7)
        recovers = next(iter(failing))
        del failing[recovers]
        rig.fail(*(fault for fault, _ in failing.values()))
        moves(rig, here, recovers)


def test_devices_are_read_on_while_the_library_cannot_count_them(well):
    rig, here = well
    rig.fail("nvmlDeviceGetCount wait 60")
    problems_are(here, {}, library="hangs")
    moves(rig, here, 7)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("nvml* UNKNOWN", "unknown"), ("nvml* DRIVER_NOT_LOADED", "no_driver")],
    ids=["after a daemon-reload", "the driver is unloaded"],
)
def test_where_all_fails_nothing_is_known_but_what_the_devices_are(well, fault, kind):
    rig, here = well
    rig.fail(fault)
    problems_are(here, {(str(device), kind): 1 for device in range(8)}, library=kind)
    assert ("", "driver") not in here.bill(rig.uuid(1))


def test_where_all_hangs_nothing_is_known_until_it_is_over(well):
    rig, here = well
    rig.fail("nvml* wait 60")
    problems_are(here, {(str(device), "hangs"): 1 for device in range(8)}, library="hangs")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("nvmlDeviceGetComputeRunningProcesses@1 NOT_SUPPORTED", "no_processes"),
        ("nvmlDeviceGetComputeRunningProcesses@1 unavailable", "no_process_memory"),
    ],
)
def test_where_processes_are_not_told_what_nobody_else_has_is_other_processes(well, fault, kind):
    rig, here = well
    rig.fail(fault)
    problems_are(here, {("1", kind): 1})
    assert here.bill(rig.uuid(1)) == {
        ("", "other_processes"): 3 * GIB,
        ("", "free"): 21 * GIB,
        ("", "driver"): DRIVER,
    }


def test_a_problem_is_logged_once_however_long_it_lasts(well):
    """Of a device that had it in no other test: one that soon comes again is not told again."""
    rig, here = well
    rig.fail("nvmlDevice*@0 RESET_REQUIRED")
    problems_are(here, {("0", "needs_reset"): 1})
    for device in (2, 4, 2, 4):
        moves(rig, here, device)
    told = [line for line in here.daemon.log.read_text().splitlines() if rig.uuid(0) in line and "needs_reset" in line]
    assert len(told) == 1


@contextmanager
def job(rig: Rig, here: Node, visible: str | None = None) -> Iterator[int]:
    """One with a probe that holds 30 MiB of the first device, or of the visible one; its pid."""
    environ = {"ALLOCSCOPE_SOCKET": str(here.socket), "ALLOCSCOPE_JOB": "job"}
    with rig.shell(environ | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})) as process:
        process(START)
        yield process.pid


def of_the_job(**more: int) -> dict[tuple[str, str], int]:
    """The lines of its allocator, and `more`."""
    lines = ("requested", "rounding", "awaiting_free", "stranded", "releasable", "private")
    return (
        {("job", line): 0 for line in lines}
        | {("job", "requested"): 30 * MIB}
        | {("job", line): amount for line, amount in more.items()}
    )


def test_a_driver_that_is_not_the_librarys_is_waited_for(tmp_path):
    rig = Rig(tmp_path)
    rig.fail("nvmlInit LIB_RM_VERSION_MISMATCH")
    with node(rig, tmp_path, *QUICK) as here:
        problems_are(here, {}, library="driver_mismatch")
        rig.fail()
        problems_are(here, {})
        moves(rig, here, 0)


def test_a_device_that_was_lost_before_the_daemon_began_is_told_by_its_place(tmp_path):
    rig = Rig(tmp_path, 2)
    rig.fail("nvmlDevice*@1 GPU_IS_LOST")
    with node(rig, tmp_path, *QUICK) as here:
        problems_are(here, {("1", "lost"): 1})
        moves(rig, here, 0)
        rig.fail()
        problems_are(here, {})
        moves(rig, here, 1)


def test_a_daemon_ends_in_order_while_the_driver_hangs(tmp_path):
    rig = Rig(tmp_path, 2)
    with node(rig, tmp_path, *QUICK) as here:
        problems_are(here, {})
        rig.fail("nvml* wait 3600")
        problems_are(here, {("0", "hangs"): 1, ("1", "hangs"): 1}, library="hangs")
        here.machine.end(here.daemon)
        assert here.daemon.said("stopped")


def test_an_old_driver_tells_devices_and_processes_but_not_its_own_part(tmp_path):
    rig = Rig(tmp_path, old_driver=True)
    rig.make_up(GONE, 3 * GIB)
    with node(rig, tmp_path, *QUICK) as here:
        assert here.bill_with(rig.uuid(), {("", "free"): 21 * GIB}) == {
            ("", "other_processes"): 3 * GIB + DRIVER,
            ("", "free"): 21 * GIB,
        }
        problems_are(here, {})


def test_without_a_library_the_jobs_tell_of_their_devices(tmp_path):
    """A file of that name that is no library: on a machine with a driver, too."""
    rig = Rig(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "libnvidia-ml.so.1").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rig, "nvml_settings", {"LD_LIBRARY_PATH": str(empty)})
        with node(rig, tmp_path, *QUICK) as here:
            patch.undo()
            problems_are(here, {}, library="no_library")
            with job(rig, here):
                assert here.bill_with(rig.uuid(), {("job", "requested"): 30 * MIB}) == of_the_job() | {
                    ("", "other_processes"): CONTEXT,
                    ("", "free"): 24 * GIB - CONTEXT - 30 * MIB,
                }


def test_where_memory_is_not_supported_a_job_tells_it_and_nvml_who_uses_it(tmp_path):
    """Parts with unified memory, such as GB10."""
    rig = Rig(tmp_path)
    rig.fail("nvmlDeviceGetMemoryInfo NOT_SUPPORTED")
    rig.make_up(GONE, 3 * GIB)
    with node(rig, tmp_path, *QUICK) as here:
        problems_are(here, {("0", "not_supported"): 1})
        assert here.bill(rig.uuid()) == {}, "how large it is, nobody knows"
        with job(rig, here):
            expected = of_the_job(outside=CONTEXT) | {
                ("", "other_processes"): 3 * GIB,
                ("", "free"): 21 * GIB - CONTEXT - 30 * MIB,
            }
            assert here.bill_with(rig.uuid(), {("job", "outside"): CONTEXT}) == expected


WITH_MIG = [
    Device(instances=[Instance(5 * GIB, "MIG-6e3dd0a1-4e4a-5d3c-9d8b-1b8a5f7d1c11"), Instance(10 * GIB)]),
    Device(),
]
"""Numbers in the rig: 0 in MIG mode, its instances 1 and 2, and a whole device, 3."""


def test_an_instance_is_billed_for_itself_and_its_device_counts_nothing_twice(tmp_path):
    rig = Rig(tmp_path, WITH_MIG)
    rig.make_up(GONE, GIB, device=1)
    with node(rig, tmp_path, *QUICK) as here, job(rig, here, visible=rig.uuid(2)):
        expected = of_the_job(outside=CONTEXT) | {
            ("", "other_processes"): 0,
            ("", "driver"): 0,
            ("", "free"): 10 * GIB - CONTEXT - 30 * MIB,
        }
        assert here.bill_with(rig.uuid(2), {("job", "outside"): CONTEXT}) == expected
        assert here.bill(rig.uuid(1)) == {("", "other_processes"): GIB, ("", "driver"): 0, ("", "free"): 4 * GIB}
        assert here.bill(rig.uuid(0)) == {}
        told = {
            device["uuid"]: (device["gpu"], device["parent_uuid"]) for device in here.get("/api/v1/devices")["items"]
        }
        assert told == {
            rig.uuid(0): (0, None), rig.uuid(1): (0, rig.uuid(0)), rig.uuid(2): (0, rig.uuid(0)), rig.uuid(3): (1, None),
        }  # fmt: skip
        assert sum(figures(here, "allocscope_device_memory_total_bytes").values()) == 24 * GIB + DRIVER + 10 * GIB
        problems_are(here, {})

        rig.fail("nvmlDeviceGetMigDeviceHandleByIndex@1 NOT_FOUND")
        until(lambda: not here.bill(rig.uuid(1)), "an instance that was destroyed is gone")
        assert here.bill(rig.uuid(2)) == expected
        problems_are(here, {})
        rig.fail()
        here.bill_with(rig.uuid(1), {("", "free"): 4 * GIB})
