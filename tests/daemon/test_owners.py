"""Whose a process is: read from copies of /proc of nodes of every kind (trees/), joined with what the kubelet says of pods."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from allocscope.daemon import owners as owners_module
from allocscope.daemon.kubelet import KubeletError
from allocscope.daemon.owners import Owners, user_name
from allocscope.daemon.pods import Holder, Holders, PodName
from allocscope.daemon.procfs import HostProcess, Procfs
from allocscope.model import Owner
from tests.daemon.fakes import Reads

TREES = Path(__file__).parent / "trees"
TRAINER_ID = "06ea17a8981d25b0315ff17bd1ebad3d95c15a3f8b764eaadb93612d9b61a54e"
TRITON_ID = "b7933ed6180d9e2895a9d2df885e2a8b92e998a3c16297581f5b8698daacf492"
EXPORTER_ID = "e6d3efc6abfd85ceacedc20ecbb866e564fe16742930c48f8618bff70c5028e6"
DOCKER_ID = "a864ed013d128c9c908c18a4c1c8e87198e50c1a65c531f4eb1aee81425a79fd"
PODMAN_ID = "425c89ed5bb78a7623fae60fd8a6f648488168740fe82cf6ad34caa4d07aa972"
TRAIN_UID = "0c5d5f2a-6d0e-4f1b-9a4b-2f6f6a1c9e01"
SERVE_UID = "7b1f0a66-93f2-4c57-8f7d-5a0e2c4d1b02"
EXPORTER_UID = "e3a9c1d4-1f2b-4a3c-b4d5-6e7f8091a203"

TRAINER_PLACE = (TRAINER_ID, "trainer", "llama-worker-0", "team-a", TRAIN_UID)
TRAINER = Owner("ann", *TRAINER_PLACE)
SERVER = Owner("root", TRITON_ID, "server", "serve-5d8f7c9b6d-x2x7k", "team-b", SERVE_UID)
GIVEN = {
    "GPU-1": (Holder(PodName("team-a", "llama-worker-0"), "trainer"),),
    "GPU-2": (
        Holder(PodName("team-b", "serve-5d8f7c9b6d-x2x7k"), "server"),
        Holder(PodName("team-b", "serve-5d8f7c9b6d-7zq4f"), "server"),
    ),
}
USERS = {0: "root", 1000: "ann", 1001: "bob", 1002: "cy", 1003: "dee"}


class Pods:
    """A kubelet."""

    def __init__(self, given: Holders | None = None, names: dict[str, PodName] | None = None) -> None:
        self.given, self.by_uid, self.asked = given, names or {}, 0
        self.error: KubeletError | None = None

    @property
    def is_there(self) -> bool:
        return self.given is not None or self.error is not None

    def holders(self) -> Holders:
        self.asked += 1
        if self.error is not None:
            raise self.error
        assert self.given is not None
        return self.given

    def names(self) -> dict[str, PodName]:
        return self.by_uid


def name_of(uid: int) -> str:
    return USERS.get(uid, str(uid))


def owners_of(procfs: Procfs, pods: Pods | None = None) -> Owners:
    return Owners(procfs, pods or Pods(), name_of_user=name_of)


def host(procfs: Procfs, pid: int) -> HostProcess:
    found = procfs.look_up(pid)
    assert found is not None
    return found


def owner_of(tree: str, pid: int, device: str = "GPU-1", pods: Pods | None = None) -> Owner | None:
    procfs = Procfs(TREES / tree)
    owners = owners_of(procfs, pods or Pods(GIVEN))
    owners.of(host(procfs, pid), device)
    owners.look(0)
    return owners.of(host(procfs, pid), device)


@pytest.mark.parametrize(
    ("tree", "pid", "device", "owner"),
    [
        ("kubernetes_systemd_v2", 48210, "GPU-1", TRAINER),
        ("kubernetes_systemd_v2", 51002, "GPU-2", SERVER),
        ("kubernetes_systemd_v2", 3100, "GPU-1", Owner("root")),
        ("kubernetes_cgroupfs_v1", 9001, "GPU-1", Owner("root", *TRAINER_PLACE)),
        ("kubernetes_cgroupfs_v1", 9100, "GPU-2", SERVER),
        ("kubernetes_crio_v2", 7001, "GPU-1", Owner("1001310000", *TRAINER_PLACE)),
        ("kind_v2", 30123, "GPU-1", Owner("root", *TRAINER_PLACE)),
        ("seen_from_a_container_v2", 48210, "GPU-1", TRAINER),
        ("seen_from_a_container_v2", 51002, "GPU-2", SERVER),
        ("seen_from_a_container_v2", 52100, "GPU-1", Owner("root")),
        ("docker_v1", 4711, "GPU-1", Owner("root", DOCKER_ID)),
        ("docker_v2", 4711, "GPU-1", Owner("ann", DOCKER_ID)),
        ("docker_v2", 4900, "GPU-1", Owner("ann")),
        ("podman_rootless_v2", 6001, "GPU-1", Owner("101000", PODMAN_ID)),
        ("podman_rootless_v2", 5990, "GPU-1", Owner("ann")),
        ("slurm_v1", 20001, "GPU-1", Owner("ann", slurm_job="8812", slurm_step="0")),
        ("slurm_v2", 20001, "GPU-1", Owner("ann", slurm_job="8812", slurm_step="0")),
        ("slurm_v2", 20100, "GPU-1", Owner("bob", slurm_job="8813", slurm_step="batch")),
        ("slurm_v2", 20200, "GPU-1", Owner("cy", slurm_job="8814", slurm_step="batch")),
        ("slurm_v2", 20300, "GPU-1", Owner("dee")),
    ],
)
def test_a_process_is_told_with_its_owner(tree, pid, device, owner):
    assert owner_of(tree, pid, device) == owner


def test_a_pod_that_uses_what_others_were_given_is_not_put_to_them():
    """A monitor in a privileged pod; its UID, its container and that container's name are its own all the same."""
    assert owner_of("kubernetes_systemd_v2", 52100) == Owner("root", EXPORTER_ID, "exporter", pod_uid=EXPORTER_UID)


def test_a_log_folder_names_a_pod_without_asking_the_kubelet():
    pods = Pods(GIVEN, names={EXPORTER_UID: PodName("monitoring", "gpu-exporter-7zq4f")})
    owner = Owner("root", EXPORTER_ID, "exporter", "gpu-exporter-7zq4f", "monitoring", EXPORTER_UID)
    assert owner_of("kubernetes_systemd_v2", 52100, pods=pods) == owner
    assert pods.asked == 0


def test_without_a_kubelet_a_pod_is_known_by_its_uid():
    owner = owner_of("kubernetes_systemd_v2", 48210, pods=Pods())
    assert owner == Owner("ann", TRAINER_ID, "trainer", pod_uid=TRAIN_UID)


def test_the_host_name_that_a_probe_tells_stands_for_an_environment_that_is_not_to_be_read(tmp_path):
    shutil.copytree(TREES / "kubernetes_systemd_v2", tmp_path / "proc")
    (tmp_path / "proc" / "51002" / "environ").unlink()
    procfs = Procfs(tmp_path / "proc")
    owners = owners_of(procfs, Pods(GIVEN))
    process = host(procfs, 51002)
    owners.of(process, "GPU-2")
    owners.look(0)
    assert owners.of(process, "GPU-2") == Owner("root", TRITON_ID, "server", pod_uid=SERVE_UID)
    owners.of(process, "GPU-2", "serve-5d8f7c9b6d-x2x7k")
    owners.look(1)
    assert owners.of(process, "GPU-2") == SERVER


def test_a_process_is_read_once_however_often_it_is_asked_for():
    procfs = Reads(TREES / "kubernetes_systemd_v2")
    owners, process = owners_of(procfs, pods := Pods(GIVEN)), host(procfs, 48210)
    procfs.count.clear()
    for second in range(100):
        owners.of(process, "GPU-1")
        owners.look(second)
    assert procfs.count == {"cgroup": 1, "mountinfo": 1, "stat": 3, "status": 1}
    assert pods.asked == 1


def test_a_pid_that_another_process_took_is_read_anew(tmp_path):
    shutil.copytree(TREES / "slurm_v2", tmp_path / "proc")
    procfs = Procfs(tmp_path / "proc")
    owners, first = owners_of(procfs), host(procfs, 20001)
    owners.of(first, "GPU-1")
    owners.look(0)
    shutil.rmtree(tmp_path / "proc" / "20001")
    shutil.copytree(TREES / "docker_v2" / "4711", tmp_path / "proc" / "20001")
    second = host(procfs, 20001)
    assert owners.of(second, "GPU-1") is None
    owners.look(1)
    assert owners.of(second, "GPU-1") == Owner("ann", DOCKER_ID)


def test_what_was_read_while_the_pid_went_to_another_is_not_told(tmp_path):
    shutil.copytree(TREES / "slurm_v2", tmp_path / "proc")
    procfs = Procfs(tmp_path / "proc")
    owners, before = owners_of(procfs), host(procfs, 20001)
    shutil.rmtree(tmp_path / "proc" / "20001")
    shutil.copytree(TREES / "docker_v2" / "4711", tmp_path / "proc" / "20001")
    owners.of(before, "GPU-1")
    owners.look(0)
    assert owners.of(before, "GPU-1") is None


def test_a_process_that_vanishes_has_no_owner(tmp_path):
    shutil.copytree(TREES / "slurm_v2", tmp_path / "proc")
    procfs = Procfs(tmp_path / "proc")
    owners, before = owners_of(procfs), host(procfs, 20001)
    shutil.rmtree(tmp_path / "proc" / "20001")
    owners.of(before, "GPU-1")
    assert owners.look(0) is None
    assert owners.of(before, "GPU-1") is None


@pytest.mark.parametrize("broken", ["loop", "folder", "missing", "nonsense"])
def test_files_that_cannot_be_read_leave_out_what_they_would_tell(tmp_path, broken):
    shutil.copytree(TREES / "kubernetes_systemd_v2", tmp_path / "proc")
    for name in ("cgroup", "mountinfo", "environ"):
        file = tmp_path / "proc" / "48210" / name
        file.unlink()
        if broken == "loop":
            file.symlink_to(name)
        elif broken == "folder":
            file.mkdir()
        elif broken == "nonsense":
            file.write_bytes(bytes(range(256)) * 9000)
    procfs = Procfs(tmp_path / "proc")
    owners = owners_of(procfs, Pods(GIVEN))
    owners.of(host(procfs, 48210), "GPU-1")
    owners.look(0)
    assert owners.of(host(procfs, 48210), "GPU-1") == Owner("ann")


def test_a_kubelet_that_fails_is_asked_again_ever_more_seldom():
    procfs = Procfs(TREES / "kubernetes_systemd_v2")
    owners = owners_of(procfs, pods := Pods())
    pods.error = KubeletError("no answer within 5 s")
    process = host(procfs, 48210)
    now_s, asked_at = 0.0, []
    owners.of(process, "GPU-1")
    for _ in range(8):
        pause_s = owners.look(now_s)
        asked_at.append(now_s)
        assert pause_s is not None
        assert owners.look(now_s + pause_s - 0.5) == 0.5
        now_s += pause_s
    assert asked_at == [0, 10, 30, 70, 150, 310, 610, 910]
    assert pods.asked == 8
    assert owners.problem == "no answer within 5 s"
    pods.error, pods.given = None, GIVEN
    assert owners.look(now_s) is None
    assert owners.of(process, "GPU-1") == TRAINER
    assert owners.problem is None


def test_who_comes_new_is_asked_for_at_once():
    procfs = Procfs(TREES / "kubernetes_systemd_v2")
    owners = owners_of(procfs, pods := Pods({}))
    owners.of(host(procfs, 52100), "GPU-1")
    assert owners.look(0) == 10
    pods.given = GIVEN
    owners.of(host(procfs, 48210), "GPU-1")
    owners.look(1)
    assert owners.of(host(procfs, 48210), "GPU-1") == TRAINER


def test_one_that_uses_no_device_any_more_is_forgotten():
    procfs = Reads(TREES / "slurm_v2")
    owners, process = owners_of(procfs), host(procfs, 20001)
    owners.of(process, "GPU-1")
    owners.look(0)
    owners.forget_others({20001})
    assert owners.of(process, "GPU-1") == Owner("ann", slurm_job="8812", slurm_step="0")
    owners.forget_others(set())
    assert owners.of(process, "GPU-1") is None


def test_no_more_are_remembered_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(owners_module, "MOST_OWNERS", 1)
    procfs = Procfs(TREES / "slurm_v2")
    owners = owners_of(procfs)
    pids = (20001, 20100)
    assert [owners.of(host(procfs, pid), "GPU-1") for pid in pids] == [None, None]
    owners.look(0)
    assert [owners.of(host(procfs, pid), "GPU-1") for pid in pids] == [
        Owner("ann", slurm_job="8812", slurm_step="0"),
        None,
    ]


def test_the_thread_answers_and_bears_what_goes_wrong():
    """A directory of users that fails on one must not keep the others from being told."""
    procfs = Procfs(TREES / "slurm_v2")
    names_asked, both = [], threading.Event()

    def name_of_user(uid: int) -> str:
        names_asked.append(uid)
        if len(names_asked) == 1:
            raise RuntimeError("a directory that is away")
        both.set()
        return name_of(uid)

    owners = Owners(procfs, Pods(), name_of_user=name_of_user)
    owners.of(host(procfs, 20001), "GPU-1")
    owners.start(lambda: 0.0)
    owners.of(host(procfs, 20100), "GPU-1")
    assert both.wait(10)
    owners.stop()
    while owners.of(host(procfs, 20100), "GPU-1") is None:  # the thread is about to say it
        pass
    assert owners.of(host(procfs, 20100), "GPU-1") == Owner("bob", slurm_job="8813", slurm_step="batch")


def test_a_user_without_a_name_is_a_number():
    assert user_name(0) == "root"
    assert user_name(3_999_999_999) == "3999999999"
    assert user_name(1 << 40) == str(1 << 40)


def test_a_name_cannot_move_a_terminals_cursor():
    procfs = Procfs(TREES / "docker_v2")
    owners = Owners(procfs, Pods(), name_of_user=lambda _uid: "an\x1b[2J\nn")
    owners.of(host(procfs, 4900), "GPU-1")
    owners.look(0)
    assert owners.of(host(procfs, 4900), "GPU-1") == Owner("an?[2J?n")
