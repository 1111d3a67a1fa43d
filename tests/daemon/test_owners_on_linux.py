"""What the copies of /proc say the running kernel says, too: namespaces in namespaces, real cgroups, a /proc that hides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from allocscope.daemon.kubelet import Kubelet
from allocscope.daemon.owners import Owners
from allocscope.daemon.procfs import Hosts, Procfs, join
from allocscope.model import Owner, Process

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
STARTED_US = 2**60


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", *IN_NAMESPACE, "true"], capture_output=True, timeout=60, check=False)
    return tried.returncode == 0


IN_NAMESPACE = ("--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@contextmanager
def running(*command: str) -> Iterator[tuple[int, int]]:
    """A shell that waits: the pid of what was started, and the shell's as it sees itself, once it runs."""
    waits = ("sh", "-c", "echo $$; read line")
    with subprocess.Popen([*command, *waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def youngest(pid: int) -> int:
    """The last of a line of only children."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


@pytest.mark.skipif(not may_unshare(), reason="this machine lets nobody make pid namespaces")
def test_a_probe_in_nested_pid_namespaces_is_joined_to_the_pid_that_the_driver_has():
    with running("unshare", *IN_NAMESPACE, "unshare", "--pid", "--fork") as (outer, own_pid):
        pid = youngest(outer)
        assert own_pid == 1
        hosts = Hosts(Procfs())
        probe = Process("a" * 32, "train", 1, "pod-0", STARTED_US)
        assert join([outer, pid], [probe], hosts.look_up) == {pid: "a" * 32}


@contextmanager
def cgroup(*names: str) -> Iterator[Path]:
    """A cgroup that a test may use; where that may not be made, the test is left."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = [fields[4] for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"]
    made: list[Path] = []
    try:
        folder = Path(roots[0] if roots else "/nowhere")
        for name in names:
            folder /= name
            folder.mkdir()
            made.append(folder)
    except OSError as error:
        pytest.skip(f"this machine lets nobody make cgroups: {error.strerror}")
    try:
        yield folder
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


def test_a_process_in_a_real_cgroup_is_told_with_its_container_and_pod(tmp_path):
    """Of version 2, beside version 1's where the machine has both."""
    uid, container_id = str(uuid.uuid4()), uuid.uuid4().hex * 2
    pod = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    with cgroup(f"{pod}-of-a-test", pod, f"cri-containerd-{container_id}.scope") as folder, running() as (pid, _):
        try:
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"this machine lets nobody into cgroups: {error.strerror}")
        procfs = Procfs()
        owners = Owners(procfs, Kubelet(tmp_path / "kubelet.sock", tmp_path), name_of_user=str)
        host = procfs.look_up(pid)
        assert host is not None
        owners.of(host, "GPU-1")
        owners.look(0)
        assert owners.of(host, "GPU-1") == Owner(str(os.geteuid()), container_id, pod_uid=uid)
        (folder.parents[2] / "cgroup.procs").write_text(str(pid))


ASK = f"""
import os
from allocscope.daemon.procfs import Procfs
os.setgroups([]), os.setresgid(*[{NOBODY}] * 3), os.setresuid(*[{NOBODY}] * 3)
procfs = Procfs()
print(procfs.hides_processes, procfs.look_up(1) is not None, procfs.environ(1, ["PATH"]))
"""


@pytest.mark.skipif(not IS_ROOT, reason="another user's processes need another user")
@pytest.mark.parametrize(
    ("hidepid", "told"), [("0", "False True {}\n"), ("1", "True False {}\n"), ("2", "True False {}\n")]
)
def test_a_daemon_without_root_knows_what_a_proc_hides(hidepid, told):
    """Others' environments are closed to it at any rate; with hidepid they have no name, and may live all the same."""
    script = 'mount -t proc -o "hidepid=$1" proc /proc || exit 77; "$2" -c "$3"; exit $?'
    in_namespace = ("unshare", "--mount", "--pid", "--fork", "sh", "-c", script, "sh")
    done = subprocess.run(
        [*in_namespace, hidepid, sys.executable, ASK], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        pytest.skip(f"this machine lets nobody mount a /proc: {done.stderr.strip()}")
    assert (done.stdout, done.stderr) == (told, "")
