"""The names of a process's cgroups tell its container, pod and Slurm step, whichever runtime named them; what is not known stays so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.daemon.cgroups import Place, place
from allocscope.daemon.slurm import SlurmStep, of_environ

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
POD = "0c5d5f2a-6d0e-4f1b-9a4b-2f6f6a1c9e01"
POD_IN_SYSTEMD = POD.replace("-", "_")
IN_POD = Place(ID, POD)
IN_CONTAINER = Place(ID)
NOWHERE = Place()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        pytest.param(f"/docker/{ID}", IN_CONTAINER, id="docker, cgroupfs"),
        pytest.param(f"/system.slice/docker-{ID}.scope", IN_CONTAINER, id="docker, systemd"),
        pytest.param(f"/system.slice/docker-{ID}.scope/init", IN_CONTAINER, id="below the container's own"),
        pytest.param(f"/docker/{OTHER}/docker/{ID}", IN_CONTAINER, id="docker in docker: the inner one"),
        pytest.param(f"/system.slice/nerdctl-{ID}.scope", IN_CONTAINER, id="nerdctl"),
        pytest.param(f"/default/{ID}", IN_CONTAINER, id="containerd alone"),
        pytest.param(f"/machine.slice/libpod-{ID}.scope/container", IN_CONTAINER, id="podman, systemd"),
        pytest.param(f"/libpod_parent/libpod-{ID}", IN_CONTAINER, id="podman, cgroupfs"),
        pytest.param(f"/system.slice/train.service/libpod-payload-{ID}", IN_CONTAINER, id="podman, split"),
        pytest.param(f"/machine.slice/libpod-conmon-{ID}.scope", NOWHERE, id="who watches a container is not in it"),
        pytest.param(f"/ecs/0123456789abcdef0123456789abcdef/{ID}", IN_CONTAINER, id="ECS"),
        pytest.param(
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_IN_SYSTEMD}.slice/cri-containerd-{ID}.scope",
            IN_POD,
            id="containerd, systemd",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-pod{POD_IN_SYSTEMD}.slice/crio-{ID}.scope", IN_POD, id="cri-o, a guaranteed pod"
        ),
        pytest.param(f"/kubepods/besteffort/pod{POD}/{ID}", IN_POD, id="containerd, cgroupfs"),
        pytest.param(f"/kubepods/pod{POD}/crio-{ID}", IN_POD, id="cri-o, cgroupfs"),
        pytest.param(
            f"/system.slice/containerd.service/kubepods-besteffort-pod{POD_IN_SYSTEMD}.slice:cri-containerd:{ID}",
            IN_POD,
            id="containerd that names as for systemd, without it",
        ),
        pytest.param(
            f"/kubepods.slice/kubepods-pod{'ab' * 16}.slice/cri-containerd-{ID}.scope",
            Place(ID, "ab" * 16),
            id="a static pod's UID is a hash",
        ),
        pytest.param(
            f"/docker/{OTHER}/kubelet/kubepods/burstable/pod{POD}/{ID}", IN_POD, id="a node that is a container"
        ),
        pytest.param(
            f"/kubepods/pod{POD}/{OTHER}/kubelet/kubepods/pod{'ab' * 16}/{ID}", IN_POD, id="a cluster in a pod: the pod"
        ),
        pytest.param(f"/kubepods/pod{POD}/{OTHER}/docker/{ID}", IN_POD, id="docker in a pod"),
        pytest.param(
            f"/../../kubepods-besteffort-pod{POD_IN_SYSTEMD}.slice/cri-containerd-{ID}.scope",
            IN_POD,
            id="from another pod's cgroup namespace",
        ),
        pytest.param(f"/../../pod{POD}/{ID}", IN_POD, id="from another pod's cgroup namespace, cgroupfs"),
        pytest.param(f"/../cri-containerd-{ID}.scope", IN_CONTAINER, id="in the daemon's own pod, which is not told"),
        pytest.param("/", NOWHERE, id="in the daemon's own container, or in none"),
        pytest.param(f"/kubepods/pod{POD}/{ID} (deleted)", IN_POD, id="removed already"),
        pytest.param(
            f"/machine.slice/machine-libpod_pod_{ID}.slice/libpod-{ID}.scope", IN_CONTAINER, id="a podman pod"
        ),
        pytest.param(f"/pod{POD}/{ID}", IN_CONTAINER, id="a pod that no kubelet made"),
        pytest.param(
            f"/user.slice/user-1000.slice/kubepods/pod{POD}/{ID}", IN_CONTAINER, id="a user's own tree names no pod"
        ),
        pytest.param(f"/docker/{ID[:-1]}", NOWHERE, id="too short for an id"),
        pytest.param(f"/docker/{ID}0", NOWHERE, id="too long for an id"),
        pytest.param("/user.slice/user-1000.slice/session-4.scope", NOWHERE, id="a login"),
        pytest.param("/system.slice/a:b/c", NOWHERE, id="colons in a name"),
    ],
)
def test_a_path_tells_container_and_pod(path, found):
    assert place(f"0::{path}\n") == found
    assert place(f"12:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:{path}\n") == found


@pytest.mark.parametrize(
    ("cgroup", "step"),
    [
        pytest.param("/slurm/uid_1000/job_8812/step_0/task_0", SlurmStep("8812", "0"), id="version 1"),
        pytest.param("/slurm_gpu01/uid_1000/job_8812/step_batch", SlurmStep("8812", "batch"), id="several slurmds"),
        pytest.param("/slurm/uid_1000/job_8812", SlurmStep("8812"), id="a job's own"),
        pytest.param(
            "/system.slice/slurmstepd.scope/job_8812/step_extern/user/task_special",
            SlurmStep("8812", "extern"),
            id="version 2, a login that pam_slurm_adopt took in",
        ),
        pytest.param(
            "/system.slice/gpu01_slurmstepd.scope/job_8812/step_interactive/user/task_0",
            SlurmStep("8812", "interactive"),
            id="version 2, several slurmds",
        ),
        pytest.param("/slurm/uid_0/job_8812/step_0+1/task_0", SlurmStep("8812", "0+1"), id="heterogeneous"),
        pytest.param("/../job_8813/step_2/user/task_0", SlurmStep("8813", "2"), id="seen from another job"),
        pytest.param("/system.slice/slurmd.service", SlurmStep(), id="Slurm's own"),
        pytest.param("/job_1/step_0", SlurmStep(), id="not Slurm's"),
        pytest.param(
            "/user.slice/user-1.slice/user@1.service/slurmstepd.scope/job_1/step_0", SlurmStep(), id="a user's own tree"
        ),
        pytest.param("/slurm/uid_0/job_x/step_0", SlurmStep(), id="no number"),
        pytest.param(f"/slurm/uid_0/job_{'9' * 11}/step_0", SlurmStep(), id="too large a number"),
    ],
)
def test_a_path_tells_slurms_job_and_step(cgroup, step):
    assert place(f"0::{cgroup}\n") == Place(slurm=step)


def test_a_slurm_step_in_a_pod_is_of_both():
    path = f"/kubepods/pod{POD}/{ID}/system.slice/slurmstepd.scope/job_7/step_1/user/task_0"
    assert place(f"0::{path}") == Place(ID, POD, SlurmStep("7", "1"))


def test_the_hierarchy_that_says_most_is_taken():
    lines = ["3:cpu,cpuacct:/slurm/uid_1/job_7", "4:freezer:/slurm/uid_1/job_7/step_2", "1:name=systemd:/", "0::/"]
    assert place("\n".join(lines)).slurm == SlurmStep("7", "2")


@pytest.mark.parametrize(
    ("environ", "step"),
    [
        ({"SLURM_JOB_ID": "8812", "SLURM_STEP_ID": "3"}, SlurmStep("8812", "3")),
        ({"SLURM_JOB_ID": "8812", "SLURM_STEP_ID": "4294967291"}, SlurmStep("8812", "batch")),
        ({"SLURM_JOB_ID": "8812", "SLURM_STEP_ID": "4294967292"}, SlurmStep("8812", "extern")),
        ({"SLURM_JOB_ID": "8812", "SLURM_STEP_ID": "4294967290"}, SlurmStep("8812", "interactive")),
        ({"SLURM_JOB_ID": "8812"}, SlurmStep("8812")),
        ({"SLURM_JOB_ID": "8812\n", "SLURM_STEP_ID": "3"}, SlurmStep()),
        ({"SLURM_STEP_ID": "3"}, SlurmStep()),
        ({}, SlurmStep()),
    ],
)
def test_an_environment_tells_slurms_job_and_step(environ, step):
    assert of_environ(environ) == step


@given(st.text())
def test_whatever_stands_there_is_read(cgroup):
    assert place(cgroup) == Place()


@pytest.mark.parametrize(
    "name", ["a" * (1 << 20), "/" * (1 << 20), "pod" * 300_000, "-" * (1 << 20), "docker-" * 100_000]
)
def test_long_lines_are_read_in_one_pass(name):
    assert place(f"0::/kubepods/{name}\n" + f"1:x:/{name}\n") == Place()
