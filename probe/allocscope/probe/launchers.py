"""What launchers leave in a process's environment: its place among the ranks, and what the run is called. Pure.

As seen of them: torchrun (torch 2.13), Slurm 22.05, Open MPI 5.0.11 (prterun), MPICH 5.0.2 (hydra, gforker), Intel MPI 2021.19,
Ray 2.60, Lightning 2.6, Accelerate 1.15; by their sources: DeepSpeed 0.19 (launcher/launch.py), the Kubeflow training operator
(pkg/controller.v1/pytorch/envvar.go); by their documentation: MVAPICH2, Horovod, Kubernetes' Indexed Jobs, Slurm's heterogeneous jobs.
The environment is other people's: what is garbled or cannot be is unknown, and nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LARGEST_RANK = 2**31 - 1
DRAWN_ID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")
"""What torchrun names a run of one node that nobody named."""
LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1|0\.0\.0\.0|")


class Place(NamedTuple):
    """Where a process stands among the ranks of its job."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None


class Launcher(NamedTuple):
    """The variables in which a launcher tells a process its place; "" where it does not tell."""

    rank: str
    world_size: str = ""
    local_rank: str = ""

    def place(self, environ: Mapping[str, str]) -> Place:
        """As it was told; nothing where rank and world cannot both be."""
        told = Place(*(number(environ.get(name)) for name in self))
        return told if is_possible(told) else Place()


TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""And all that imitate it: DeepSpeed, Accelerate, Ray Train, the training operator."""
OPEN_MPI = Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
MVAPICH2 = Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK")
HOROVOD = Launcher("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK")
HYDRA = Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
"""MPICH and Intel MPI."""
PMIX = Launcher("PMIX_RANK")
SLURM = Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
LIGHTNING = Launcher("LOCAL_RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Its own launcher leaves no RANK; the ranks of the first node are its local ones."""
INDEXED_JOB = Launcher("JOB_COMPLETION_INDEX")


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher that told this process its place."""
    return next((launcher for launcher in _ORDER if launcher.rank in environ and _is_meant(launcher, environ)), None)


_ORDER = (TORCHRUN, OPEN_MPI, MVAPICH2, HOROVOD, HYDRA, PMIX, SLURM, LIGHTNING, INDEXED_JOB)


def _is_meant(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    in_step = "SLURM_STEP_ID" in environ
    if launcher is SLURM:  # the batch script is told of a task 0 of all the tasks that are not begun yet
        return in_step
    if launcher is HYDRA:  # srun --mpi=pmi2 has the first two as well
        return not in_step or HYDRA.local_rank in environ
    if launcher is PMIX:  # srun --mpi=pmix
        return not environ.get("PMIX_NAMESPACE", "").startswith("slurm.")
    return True


def place_of(environ: Mapping[str, str]) -> Place:
    """Rank, world size and local rank as the innermost launcher gave them; never mixed from two of them."""
    launcher = launcher_of(environ)
    if launcher is None:
        return Place()
    place = launcher.place(environ)
    if launcher is LIGHTNING and (place.world_size is None or number(environ.get("NODE_RANK")) != 0):
        return place._replace(rank=None)
    return place


def run_name(environ: Mapping[str, str], program: str, arguments: Sequence[str] = ()) -> str | None:
    """What the run is called: the same for all of its ranks, another one for the next run. None: nobody named it.

    `arguments` are the process's own: Ray tells its workers by them which cluster they are of.
    """
    return (
        _of_slurm(environ)
        or _of_torchrun(environ, program)
        or _of_ray(environ, arguments)
        or _of_mpi(environ, program)
        or _of_kubernetes(environ)
        or _of_meeting_point(environ, program)
    )


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    """The number is that which `squeue` shows; the first step, or the script itself, needs no more."""
    number_ = told(environ, "SLURM_JOB_ID_HET_GROUP_0") or told(environ, "SLURM_JOB_ID")
    if not number_:
        return None
    if (array := told(environ, "SLURM_ARRAY_JOB_ID")) and (task := told(environ, "SLURM_ARRAY_TASK_ID")):
        number_ = f"{array}_{task}"
    step = told(environ, "SLURM_STEP_ID")
    name = told(environ, "SLURM_JOB_NAME") or "slurm"
    return f"{name}-{number_}" + (f".{step}" if step not in ("", "0") else "")


def _of_torchrun(environ: Mapping[str, str], program: str) -> str | None:
    run = told(environ, "TORCHELASTIC_RUN_ID")
    if run in ("", "none"):  # the latter is the same for everybody
        return None
    return f"{program}-{run[:8]}" if DRAWN_ID.fullmatch(run) else run


def _of_ray(environ: Mapping[str, str], arguments: Sequence[str]) -> str | None:
    """Ray numbers the jobs of a cluster, so each cluster has a 01000000; and one job may have many worlds (Tune)."""
    number_ = told(environ, "RAY_JOB_ID")
    if not number_:
        return None
    cluster = next((a.partition("=")[2] for a in arguments if a.startswith("--cluster-id=")), "")
    port = told(environ, "MASTER_PORT") if "RANK" in environ else ""
    return f"ray-{number_}" + (f"-{cluster[:8]}" if cluster else "") + (f":{port}" if port else "")


def _of_mpi(environ: Mapping[str, str], program: str) -> str | None:
    """Open MPI and whatever else has PMIx; Intel MPI. MPICH leaves no name."""
    space = told(environ, "PMIX_NAMESPACE") or told(environ, "I_MPI_HYDRA_UUID").replace("-", "")[:12]
    return f"{program}-{space}" if space else None


def _of_kubernetes(environ: Mapping[str, str]) -> str | None:
    """A job of the training operator or an Indexed Job by its pods' names; else a pod is a run of its own."""
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return None
    pod = told(environ, "HOSTNAME")
    if name := told(environ, "JOB_NAME"):
        return name
    if (match := re.fullmatch(r"(.+)-(master|worker)-[0-9]+", pod)) and environ.keys() & {"RANK", "PET_NNODES"}:
        return match[1]
    if index := told(environ, "JOB_COMPLETION_INDEX"):
        return pod.removesuffix(f"-{index}") or None
    return None if "MASTER_ADDR" in environ else pod or None


def _of_meeting_point(environ: Mapping[str, str], program: str) -> str | None:
    """Where the ranks of several nodes meet; of one node they may all meet at the same port, one run after the other."""
    address, port = told(environ, "MASTER_ADDR"), told(environ, "MASTER_PORT")
    if LOOPBACK.fullmatch(address) or not port or number(environ.get("GROUP_WORLD_SIZE")) == 1:
        return None
    return f"{program}@{address}:{port}"


def told(environ: Mapping[str, str], name: str) -> str:
    """What a variable says; "" where it says nothing."""
    return environ.get(name, "").strip()


def number(text: str | None) -> int | None:
    """A count or rank; None for what is none."""
    if text is None or not re.fullmatch(r"\s*[0-9]{1,10}\s*", text):
        return None
    return natural(int(text))


def natural(*values: object) -> int | None:
    """The first that is a count or rank."""
    return next((v for v in values if type(v) is int and 0 <= v <= LARGEST_RANK), None)


def is_possible(place: Place) -> bool:
    """Ranks count from 0 to below the world's size."""
    return place.rank is None or place.world_size is None or place.rank < place.world_size
