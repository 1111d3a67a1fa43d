"""Who a process is, from what launchers leave in the environment, and what lies in it."""

import os
import re
import socket
import sys

import pytest

from allocscope.model import wire
from allocscope.probe import identity
from allocscope.probe.identity import Place, identify, job_of, place_of

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}
MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        pytest.param({}, Place(), id="alone"),
        pytest.param(TORCHRUN, Place(3, 8, 1), id="torchrun"),
        pytest.param(SLURM, Place(5, 16, 0), id="Slurm"),
        pytest.param(MPI, Place(2, 4, 2), id="Open MPI"),
        pytest.param({**SLURM, **MPI, **TORCHRUN}, Place(3, 8, 1), id="torchrun inside Slurm"),
        pytest.param({**SLURM, "RANK": "3"}, Place(3, None, None), id="two launchers are not mixed"),
        pytest.param({**TORCHRUN, "RANK": "abc"}, Place(None, 8, 1), id="a garbled rank"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, Place(None, 8, 1), id="a negative rank"),
        pytest.param({**TORCHRUN, "RANK": "8"}, Place(), id="a rank beyond the world is a lie"),
        pytest.param({**TORCHRUN, "WORLD_SIZE": "9" * 30}, Place(3, None, 1), id="a world beyond any"),
        pytest.param({**TORCHRUN, "LOCAL_RANK": ""}, Place(3, 8, None), id="an empty local rank"),
        pytest.param({**TORCHRUN, "RANK": "²"}, Place(None, 8, 1), id="a digit that is none"),
    ],
)
def test_the_place_among_the_ranks(environ, place):
    assert place_of(environ) == place


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        pytest.param({}, "train.py@node:77", id="alone"),
        pytest.param({"ALLOCSCOPE_JOB": " mine ", "SLURM_JOB_ID": "1"}, "mine", id="ours wins"),
        pytest.param({"SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "llama"}, "llama-123", id="Slurm"),
        pytest.param({"SLURM_JOB_ID": "123"}, "slurm-123", id="Slurm without a name"),
        pytest.param({"TORCHELASTIC_RUN_ID": "exp-7"}, "exp-7", id="torchrun"),
        pytest.param({"TORCHELASTIC_RUN_ID": "none"}, "train.py@node:70", id="torchrun's default names the agent"),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
            "train.py@head:29500",
            id="torchrun's default on several nodes names the meeting point",
        ),
        pytest.param(
            {
                "TORCHELASTIC_RUN_ID": "none",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "29500",
            },
            "train.py@node:70",
            id="torchrun's default on one node",
        ),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "0a1b2c3d-1111-2222-3333-444455556666"},
            "train.py-0a1b2c3d",
            id="torchrun --standalone",
        ),
        pytest.param({"PMIX_NAMESPACE": "prterun-9"}, "train.py-prterun-9", id="Open MPI"),
        pytest.param({"RAY_JOB_ID": "02000000"}, "ray-02000000", id="Ray"),
        pytest.param({"KUBERNETES_SERVICE_HOST": "x", "HOSTNAME": "train-0"}, "train-0", id="Kubernetes"),
        pytest.param({"KUBERNETES_SERVICE_HOST": "x", "HOSTNAME": "p", "JOB_NAME": "j"}, "j", id="Kubernetes, told"),
        pytest.param({"JOB_NAME": "of-another-system", "HOSTNAME": "h"}, "train.py@node:77", id="not Kubernetes"),
        pytest.param(
            {"SLURM_JOB_ID": " ", "TORCHELASTIC_RUN_ID": "", "RAY_JOB_ID": ""}, "train.py@node:77", id="empty"
        ),
    ],
)
def test_the_job_has_one_name_for_all_ranks_of_one_run(environ, job):
    assert job_of(environ, "train.py", "node", 77, 70) == job


def test_a_process_says_who_it_is():
    process = identify({**TORCHRUN, "ALLOCSCOPE_JOB": "j"}, started_us=5, torch_version="2.14.1", allocator_conf="")
    assert (process.job, process.rank, process.world_size, process.local_rank) == ("j", 3, 8, 1)
    assert (process.pid, process.host, process.started_us) == (os.getpid(), socket.gethostname(), 5)
    assert (process.torch_version, process.allocator_conf, process.devices) == ("2.14.1", "", ())
    assert re.fullmatch("[0-9a-f]{32}", process.process_id)
    assert wire.process_from_wire(wire.process_to_wire(process)) == process


def test_no_two_processes_have_one_id():
    assert len({identify({}, started_us=1).process_id for _ in range(100)}) == 100


def test_what_the_caller_says_wins():
    process = identify(
        {**TORCHRUN, "ALLOCSCOPE_JOB": "j"}, started_us=1, job="given", place=Place(rank=0, world_size=2)
    )
    assert (process.job, process.rank, process.world_size, process.local_rank) == ("given", 0, 2, 1)


def test_a_caller_who_lies_is_not_believed():
    process = identify({}, started_us=1, place=Place("x", -2, True))  # type: ignore[arg-type]
    assert (process.rank, process.world_size, process.local_rank) == (None, None, None)
    process = identify({}, started_us=1, place=Place(9, 4, 0))
    assert (process.rank, process.world_size) == (None, None)


def test_a_name_is_bounded():
    assert len(identify({"ALLOCSCOPE_JOB": "x" * 10_000}, started_us=1).job) == 200


@pytest.mark.parametrize(
    ("argv", "spec_name", "program"),
    [
        (["/home/me/train.py", "--lr", "1"], None, "train.py"),
        (["/x/pkg/__main__.py"], None, "pkg"),
        (["/x/pkg/__main__.py"], "pkg.__main__", "pkg"),
        (["/x/pkg/train.py"], "pkg.train", "pkg.train"),
        (["-c"], None, "python"),
        ([""], None, "python"),
        ([], None, "python"),
    ],
)
def test_the_program_is_named_without_its_arguments(monkeypatch, argv, spec_name, program):
    class Main:
        __spec__ = type("Spec", (), {"name": spec_name}) if spec_name else None

    monkeypatch.setitem(sys.modules, "__main__", Main)
    monkeypatch.setattr(sys, "argv", argv)
    assert identity.program() == program
