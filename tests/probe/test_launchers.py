"""What launchers leave in the environment, as recorded from them: place and name. Real torchrun and mp.spawn where torch is to be had."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from allocscope.probe.launchers import Place, place_of, run_name
from tests import needs

# As found in real processes. Of Slurm (22.05) only what could matter is kept.

TORCHRUN = {
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "41117", "RANK": "1", "ROLE_NAME": "default", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "905a5955-8f34-4a54-ae53-2a0935d7aeb6", "WORLD_SIZE": "2",
}  # fmt: skip
TORCHRUN_NODES = {
    **TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500", "RANK": "3",
    "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4",
}  # fmt: skip
SLURM_BATCH = {
    "SLURM_GTIDS": "0", "SLURM_JOBID": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "llama", "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "0", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NPROCS": "2", "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2", "SLURM_TASK_PID": "4443",
}  # fmt: skip
SLURM_STEP = {
    **SLURM_BATCH, "SLURM_GTIDS": "0,1", "SLURM_LOCALID": "1", "SLURM_PROCID": "1", "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASK_PID": "4467",
}  # fmt: skip
SLURM_SECOND_STEP = {
    **SLURM_BATCH, "SLURM_NPROCS": "1", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1",
}  # fmt: skip
SLURM_ARRAY = {
    **SLURM_STEP, "SLURM_ARRAY_JOB_ID": "2", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "arr",
}  # fmt: skip
SLURM_HET = {**SLURM_STEP, "SLURM_HET_SIZE": "2", "SLURM_JOB_ID": "43", "SLURM_JOB_ID_HET_GROUP_0": "42"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_HOSTNAME": "vm",
    "PMIX_NAMESPACE": "prterun-vm-21456@1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1",
}  # fmt: skip
MPICH = {
    "HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "11", "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip
MPICH_GFORKER = {"MPI_APPNUM": "0", "MPI_UNIVERSE_SIZE": "-1", "PMI_FD": "12", "PMI_RANK": "1", "PMI_SIZE": "2"}
INTEL_MPI = {
    "I_MPI_HYDRA_UUID": "30680000-932a-716a-7361-06005085f46d", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1",
    "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip
MVAPICH2 = {"MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4"}
HOROVOD = {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_RANK": "2", "HOROVOD_SIZE": "4"}
RAY_ACTOR = {"RAY_CLIENT_MODE": "0", "RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "25420"}
RAY_TRAIN = {
    **RAY_ACTOR, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.2", "MASTER_PORT": "54799",
    "NODE_RANK": "0", "RANK": "1", "WORLD_SIZE": "2",
}  # fmt: skip
RAY_ARGUMENTS = ("…/default_worker.py", "--node-id=c97a", "--cluster-id=673e1c779cf54e1d77d83e0ea360a22e")
LIGHTNING = {
    "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "48219", "NODE_RANK": "0", "WORLD_SIZE": "2",
}  # fmt: skip
LIGHTNING_SPAWN = {"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "54793"}
ACCELERATE_ONE = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
DEEPSPEED = {
    "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "RANK": "2", "WORLD_SIZE": "4",
}  # fmt: skip
POD = {"HOSTNAME": "llama-worker-0", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
PYTORCH_JOB = {
    **POD, "MASTER_ADDR": "llama-master-0", "MASTER_PORT": "23456", "PYTHONUNBUFFERED": "0", "RANK": "1",
    "WORLD_SIZE": "2",
}  # fmt: skip
PYTORCH_JOB_ELASTIC = {
    **POD,
    "PET_NNODES": "1:2",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "llama-worker-0:23456",
}
INDEXED_JOB = {**POD, "HOSTNAME": "shards-3", "JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        pytest.param({}, Place(), id="alone"),
        pytest.param(TORCHRUN, Place(1, 2, 1), id="torchrun"),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, Place(1, 2, 1), id="torchrun, restarted"),
        pytest.param({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 1), id="torchrun, shrunk"),
        pytest.param(TORCHRUN_NODES, Place(3, 4, 1), id="torchrun on two nodes"),
        pytest.param(SLURM_STEP, Place(1, 2, 1), id="srun"),
        pytest.param(SLURM_SECOND_STEP, Place(0, 1, 0), id="srun of one task in a job of two"),
        pytest.param(SLURM_BATCH, Place(), id="the batch script is no rank"),
        pytest.param(SLURM_HET, Place(1, 2, 1), id="a heterogeneous job"),
        pytest.param({**SLURM_STEP, **TORCHRUN_NODES}, Place(3, 4, 1), id="torchrun in srun"),
        pytest.param({**SLURM_BATCH, **TORCHRUN}, Place(1, 2, 1), id="torchrun in a batch script"),
        pytest.param({**SLURM_BATCH, **OPEN_MPI}, Place(1, 2, 1), id="mpirun in a batch script"),
        pytest.param(OPEN_MPI, Place(1, 2, 1), id="Open MPI"),
        pytest.param({"PMIX_NAMESPACE": "prterun-n-1@1", "PMIX_RANK": "1"}, Place(1), id="PMIx alone"),
        pytest.param(
            {**SLURM_STEP, "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "1"}, Place(1, 2, 1), id="srun --mpi=pmix"
        ),
        pytest.param({**SLURM_STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}, Place(1, 2, 1), id="srun --mpi=pmi2"),
        pytest.param(MPICH, Place(1, 2, 1), id="MPICH"),
        pytest.param({**SLURM_SECOND_STEP, **MPICH}, Place(1, 2, 1), id="MPICH's mpiexec in srun"),
        pytest.param(MPICH_GFORKER, Place(1, 2, None), id="MPICH by gforker"),
        pytest.param(INTEL_MPI, Place(1, 2, 1), id="Intel MPI"),
        pytest.param(MVAPICH2, Place(2, 4, 0), id="MVAPICH2"),
        pytest.param(HOROVOD, Place(2, 4, 0), id="Horovod"),
        pytest.param({**OPEN_MPI, **DEEPSPEED}, Place(2, 4, 0), id="DeepSpeed over mpirun"),
        pytest.param(RAY_ACTOR, Place(), id="a Ray actor"),
        pytest.param(RAY_TRAIN, Place(1, 2, 1), id="a worker of Ray Train"),
        pytest.param(LIGHTNING, Place(1, 2, 1), id="Lightning's own launcher"),
        pytest.param({**LIGHTNING, "NODE_RANK": "1"}, Place(None, 2, 1), id="Lightning's, on another node"),
        pytest.param(LIGHTNING_SPAWN, Place(None, None, 1), id="Lightning's ddp_spawn"),
        pytest.param({**SLURM_STEP, "LOCAL_RANK": "1"}, Place(1, 2, 1), id="a script that sets LOCAL_RANK itself"),
        pytest.param(ACCELERATE_ONE, Place(), id="accelerate launch of one process"),
        pytest.param(PYTORCH_JOB, Place(1, 2, None), id="a PyTorchJob"),
        pytest.param({**PYTORCH_JOB, **TORCHRUN_NODES}, Place(3, 4, 1), id="torchrun in a PyTorchJob"),
        pytest.param(INDEXED_JOB, Place(3), id="an Indexed Job"),
        pytest.param(POD, Place(), id="a pod"),
        pytest.param({**SLURM_STEP, "RANK": "3"}, Place(3, None, None), id="two launchers are not mixed"),
        pytest.param({**TORCHRUN, "RANK": "abc"}, Place(None, 2, 1), id="a garbled rank"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, Place(None, 2, 1), id="a negative rank"),
        pytest.param({**TORCHRUN, "RANK": "2"}, Place(), id="a rank beyond the world is a lie"),
        pytest.param({**TORCHRUN, "WORLD_SIZE": "9" * 30}, Place(1, None, 1), id="a world beyond any"),
        pytest.param({**TORCHRUN, "LOCAL_RANK": ""}, Place(1, 2, None), id="an empty local rank"),
        pytest.param({**TORCHRUN, "RANK": "²"}, Place(None, 2, 1), id="a digit that is none"),
    ],
)
def test_the_place_among_the_ranks(environ, place):
    assert place_of(environ) == place


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        pytest.param({}, None, id="alone"),
        pytest.param(SLURM_BATCH, "llama-1", id="Slurm's batch script"),
        pytest.param(SLURM_STEP, "llama-1", id="its first step"),
        pytest.param(SLURM_SECOND_STEP, "llama-1.1", id="its second step is another run"),
        pytest.param({"SLURM_JOB_ID": "123"}, "slurm-123", id="Slurm without a name"),
        pytest.param(SLURM_ARRAY, "arr-2_3", id="a task of an array, as squeue calls it"),
        pytest.param(SLURM_HET, "llama-42", id="a heterogeneous job is called by its leader"),
        pytest.param({**SLURM_STEP, **TORCHRUN_NODES}, "llama-1", id="torchrun in srun"),
        pytest.param(TORCHRUN, "train.py-905a5955", id="torchrun"),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "exp-7"}, "exp-7", id="torchrun --rdzv-id"),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3", "RANK": "0"}, "train.py-905a5955", id="torchrun, restarted"
        ),
        pytest.param({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, None, id="an older torchrun on one node"),
        pytest.param(TORCHRUN_NODES, "train.py@head:29500", id="an older torchrun on two nodes"),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "n1"}, None, id="and on one, by its name"
        ),
        pytest.param(RAY_ACTOR, "ray-01000000-673e1c77", id="a Ray actor"),
        pytest.param(RAY_TRAIN, "ray-01000000-673e1c77:54799", id="a worker of Ray Train"),
        pytest.param(OPEN_MPI, "train.py-prterun-vm-21456@1", id="Open MPI"),
        pytest.param(INTEL_MPI, "train.py-30680000932a", id="Intel MPI"),
        pytest.param(MPICH, None, id="MPICH leaves none"),
        pytest.param(DEEPSPEED, "train.py@10.0.0.1:29500", id="DeepSpeed on two nodes"),
        pytest.param({**DEEPSPEED, "MASTER_ADDR": "127.0.0.1"}, None, id="DeepSpeed on one"),
        pytest.param(LIGHTNING, None, id="Lightning on one node"),
        pytest.param({**LIGHTNING, "MASTER_ADDR": "::1"}, None, id="Lightning on one node, by IPv6"),
        pytest.param({**LIGHTNING, "MASTER_ADDR": "n0"}, "train.py@n0:48219", id="Lightning on several"),
        pytest.param(PYTORCH_JOB, "llama", id="a PyTorchJob"),
        pytest.param({**PYTORCH_JOB, "HOSTNAME": "llama-master-0"}, "llama", id="its master"),
        pytest.param(PYTORCH_JOB_ELASTIC, "llama", id="an elastic PyTorchJob"),
        pytest.param({**PYTORCH_JOB, "TORCHELASTIC_RUN_ID": "none"}, "llama", id="torchrun in a PyTorchJob"),
        pytest.param(INDEXED_JOB, "shards", id="an Indexed Job"),
        pytest.param({**POD, "JOB_NAME": "j"}, "j", id="a pod that was told"),
        pytest.param({**POD, "HOSTNAME": "chat-7d4b9c6f5d-x2x9k"}, "chat-7d4b9c6f5d-x2x9k", id="a pod of a Deployment"),
        pytest.param({**POD, "HOSTNAME": "train-0"}, "train-0", id="a pod of a StatefulSet"),
        pytest.param(
            {**POD, "HOSTNAME": "train-1", "MASTER_ADDR": "train-0.t", "MASTER_PORT": "1"}, "train.py@train-0.t:1",
            id="pods of a StatefulSet that meet",
        ),
        pytest.param({"JOB_NAME": "of-another-system", "HOSTNAME": "h"}, None, id="not Kubernetes"),
        pytest.param({"SLURM_JOB_ID": " ", "TORCHELASTIC_RUN_ID": "", "RAY_JOB_ID": ""}, None, id="empty"),
    ],
)  # fmt: skip
def test_the_run_has_one_name_for_all_its_ranks(environ, name):
    assert run_name(environ, "train.py", RAY_ARGUMENTS) == name


def test_a_ray_without_cluster_ids_is_called_by_the_jobs_number():
    assert run_name(RAY_ACTOR, "default_worker.py") == "ray-01000000"


# real launchers

WHO = """
import json, os, sys
from allocscope.probe.identity import Who
def say(**more):
    who = Who(os.environ, daemon="/nowhere/" + os.environ["TEST_ID"])
    process = who.process(1)
    word = {name: getattr(process, name) for name in ("job", "rank", "world_size", "local_rank", "pid")}
    sys.stdout.write(json.dumps({**word, **more}) + "\\n")
    sys.stdout.flush()
    return who
"""
RANK = WHO + "say(parent=os.getppid(), restart=os.environ.get('TORCHELASTIC_RESTART_COUNT'))\n"


def launched(tmp_path: Path, script: str, *command: object, **environ: str) -> list[dict]:
    """What the processes of a run of `script` said of themselves, by rank."""
    python = needs.torch_python()
    path = tmp_path / "train.py"
    path.write_text(script)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [python, *map(str, command), path], env={**kept, "TEST_ID": str(tmp_path), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(words, key=lambda word: -1 if word["rank"] is None else word["rank"])


TORCH_RUN = ("-m", "torch.distributed.run", "--nproc-per-node", 2)


def test_torchrun_restarts_its_ranks_under_the_same_name(tmp_path):
    script = RANK + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(1)\n"
    words = launched(tmp_path, script, *TORCH_RUN, "--max-restarts", 1)
    last = [w for w in words if w["restart"] == "1"]
    assert [(w["rank"], w["world_size"], w["local_rank"]) for w in last] == [(0, 2, 0), (1, 2, 1)]
    assert len({w["job"] for w in words}) == 1
    assert last[0]["job"].startswith(("train.py-", "train.py@"))  # by the id that it draws; an older one by its pid


HELPED = (
    RANK
    + """
from allocscope.probe.ancestry import root_of
import subprocess
root = str(root_of(os.getpid(), "RANK").pid)
if len(sys.argv) == 1:
    import torch
    subprocess.run([sys.executable, __file__, root], check=True)
else:
    assert sys.argv[1] == root
    sys.stdout.write(json.dumps({"rank": None, "root": root}) + "\\n")
"""
)


def test_a_process_that_a_rank_starts_is_of_the_job_and_has_no_rank(tmp_path):
    """The ranks' parents are shells, another one for each; the root of all is torchrun all the same."""
    wrapper = tmp_path / "wrap.sh"
    wrapper.write_text(f'#!/bin/sh\n{needs.torch_python()} "$@"\nexit $?\n')
    wrapper.chmod(0o755)
    named = ("--rdzv-id", "exp-7", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    words = launched(tmp_path, HELPED, *TORCH_RUN, *named, "--no-python", wrapper)
    assert len({w.pop("root") for w in words if "root" in w}) == 1
    words = [w for w in words if "job" in w]
    assert [(w["rank"], w["world_size"], w["local_rank"]) for w in words] == [
        (None, 2, None), (None, 2, None), (0, 2, 0), (1, 2, 1),
    ]  # fmt: skip
    assert {w["job"] for w in words} == {"exp-7"}
    assert len({w["parent"] for w in words}) == 4


SPAWN = (
    WHO
    + """
import torch.distributed as dist, torch.multiprocessing as mp
def train(rank, port):
    who = say(when="before")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    assert who.look()
    assert not who.look()
    sys.stdout.write(json.dumps({**who.standing._asdict(), "when": "after"}) + "\\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    assert not who.look()
if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    say(when="parent")
    mp.spawn(train, (port,), nprocs=2)
"""
)


def test_ranks_that_are_spawned_share_their_parents_name_and_learn_their_rank_from_torch(tmp_path):
    words = launched(tmp_path, SPAWN)
    assert len({w["job"] for w in words}) == 1
    parent = next(w for w in words if w["when"] == "parent")
    assert words[0]["job"] == f"train.py@{os.uname().nodename}:{parent['pid']}"
    assert [w["rank"] for w in words if w["when"] == "before"] == [None, None]
    assert [(w["rank"], w["world_size"]) for w in words if w["when"] == "after"] == [(0, 2), (1, 2)]


LIGHTNING_LIKE = (
    WHO
    + """
import subprocess
environ = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="48219", NODE_RANK="0", WORLD_SIZE="2")
if "LOCAL_RANK" not in os.environ:
    child = {**os.environ, **environ, "LOCAL_RANK": "1"}
    os.environ.update(environ, LOCAL_RANK="0")
    subprocess.run([sys.executable, __file__], env=child, check=True)
say()
"""
)


def test_a_program_that_runs_itself_again_for_each_rank_is_one_job(tmp_path):
    """As Lightning's own launcher does."""
    words = launched(tmp_path, LIGHTNING_LIKE)
    assert [(w["rank"], w["world_size"]) for w in words] == [(0, 2), (1, 2)]
    assert {w["job"] for w in words} == {f"train.py@{os.uname().nodename}:{words[0]['pid']}"}


def test_no_rank_is_had_twice_on_a_node_whoever_set_it(tmp_path):
    """The helper sets the same rank as the process that started it, and cannot be told from it."""
    words = launched(tmp_path, WHO + (
        "import subprocess\n"
        "os.environ.update(RANK='0', WORLD_SIZE='1', TORCHELASTIC_RUN_ID='exp')\n"
        "who = say()\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.run([sys.executable, __file__, 'again'], check=True)\n"
        "    who.close()\n"
        "    subprocess.run([sys.executable, __file__, 'again'], check=True)\n"
    ))  # fmt: skip
    assert [(w["rank"], w["job"]) for w in words] == [(None, "exp"), (0, "exp"), (0, "exp")]
