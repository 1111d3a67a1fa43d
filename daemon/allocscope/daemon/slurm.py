"""Which Slurm job and step a process is of, by the names of cgroups and by its environment. Pure.

Sources: Slurm's cgroup/v1 plugin (/slurm/uid_UID/job_JOB/step_STEP/task_TASK) and cgroup/v2 plugin
(/system.slice/slurmstepd.scope/job_JOB/step_STEP/user/task_TASK), slurm/slurm.h for the numbers of special steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID")
"""What is read of an environment."""

_ROOT = re.compile(r"slurm(?:_.+)?|(?:.+_)?slurmstepd\.scope")
"""Where a node has several slurmds, each with its name."""
_JOB, _STEP = re.compile(r"job_(\d{1,10})"), re.compile(r"step_([a-z0-9+]{1,24})")
_NUMBER = re.compile(r"\d{1,10}")
_SPECIAL = {"4294967290": "interactive", "4294967291": "batch", "4294967292": "extern"}


class SlurmStep(NamedTuple):
    """A step of a job; None: not known, or none."""

    job: str | None = None
    step: str | None = None
    """A number, "batch", "extern" or "interactive"; "0+1" in a heterogeneous job."""


def of_cgroup(names: Iterable[str], *, is_relative: bool) -> SlurmStep:
    """By the names in a cgroup's path, from the outermost; `is_relative`: it is told from a cgroup namespace, without its beginning."""
    in_slurm, job = is_relative, None
    for name in names:
        if job is not None:
            step = _STEP.fullmatch(name)
            return SlurmStep(job, step[1] if step else None)
        if in_slurm and (found := _JOB.fullmatch(name)):
            job = found[1]
        in_slurm = in_slurm or _ROOT.fullmatch(name) is not None
    return SlurmStep(job)


def of_environ(environ: Mapping[str, str]) -> SlurmStep:
    """By its variables, which a process may have from anywhere, so only where cgroups do not tell."""
    job, step = (found[0] if (found := _NUMBER.fullmatch(environ.get(name, ""))) else None for name in VARIABLES)
    if job is None:
        return SlurmStep()
    return SlurmStep(job, _SPECIAL.get(step, step) if step is not None else None)


def fullest(told: Iterable[SlurmStep]) -> SlurmStep:
    """The one that says most: not every hierarchy of version 1 knows the step."""
    return max(told, key=lambda it: (it.job is not None, it.step is not None), default=SlurmStep())
