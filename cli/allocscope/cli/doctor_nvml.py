"""What NVML tells the doctor, read as the daemon reads it, once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from allocscope.cli.doctor_findings import Finding, State
from allocscope.daemon.nvml import SWITCHED_OFF, Nvml, NvmlRound, load_pynvml
from allocscope.daemon.nvml_device import NvmlDevice
from allocscope.daemon.nvml_problems import LASTING, REMEDIES, NvmlProblem, ProblemKind
from allocscope.daemon.nvml_watch import NvmlWatch
from allocscope.model.figures import size

ABOUT = "nvml"


@dataclass(frozen=True, slots=True)
class NvmlSight:
    """What was seen."""

    round: NvmlRound
    driver_version: str | None = None
    library_version: str | None = None


def look_at_nvml(within_s: float) -> NvmlSight:
    """One reading of each device; what has not answered by then hangs."""
    nvml = Nvml(load_pynvml)
    watch = NvmlWatch(nvml, interval_s=60, timeout_s=within_s * 0.9, clock=time.monotonic)
    watch.start()
    watch.wait_until_read(within_s)
    watch.stop()
    latest = watch.latest()
    if latest.problem:
        return NvmlSight(latest)
    return NvmlSight(latest, nvml.driver_version(), nvml.library_version())


def nvml_findings(seen: NvmlSight) -> Iterator[Finding]:
    """The library, and each device."""
    if seen.round.problem:
        yield _of_problem("NVML cannot be used", seen.round.problem)
        return
    whole = [device for device in seen.round.devices if device.parent_uuid is None]
    versions = {"driver_version": seen.driver_version, "nvml_version": seen.library_version}
    text = f"driver {seen.driver_version or '(version not told)'}, NVML {seen.library_version or '(version not told)'}"
    yield Finding(ABOUT, State.WELL, f"{text}: {_devices(len(whole))}", facts=versions)
    for device in seen.round.devices:
        yield _of_device(device, sum(part.parent_uuid == device.uuid for part in seen.round.devices))


def is_switched_off(status: Mapping[str, Any] | None) -> bool:
    """Whether the daemon that runs was told to read no NVML: then nothing is wrong where there is none."""
    return status is not None and SWITCHED_OFF.problem is not None and _said(status) == str(SWITCHED_OFF.problem)


def _said(status: Mapping[str, Any]) -> object:
    problem = status.get("nvml")
    return (
        problem.get("problem") if isinstance(problem, Mapping) and problem.get("kind") == ProblemKind.NOT_READ else None
    )


def switched_off_findings(seen: NvmlSight) -> Iterator[Finding]:
    """What is here all the same, though nobody reads it."""
    if seen.round.problem:
        here = f"nor could it here: {seen.round.problem.text}"
        yield Finding(ABOUT, State.NOTE, f"the daemon does not read NVML, as it was told (nvml = false); {here}")
        return
    whole = sum(device.parent_uuid is None for device in seen.round.devices)
    text = f"the daemon does not read NVML, as it was told (nvml = false), though {_devices(whole)} can be read here"
    yield Finding(ABOUT, State.NOTE, text, "take nvml = false out of its settings, and restart it")


def daemon_nvml_findings(status: Mapping[str, Any], seen: NvmlSight | None) -> Iterator[Finding]:
    """What the daemon cannot read, though it is read here: it may be in a container, or have begun before."""
    problem = status["nvml"]
    if problem is not None and problem["kind"] != ProblemKind.NOT_READ:
        if seen is None or seen.round.problem is None:
            yield _of_problem("the daemon cannot use NVML", _read(problem["kind"], problem["problem"]))
        return
    wrong_here = {device.uuid for device in seen.round.devices if device.problem} if seen else set()
    for device in status["devices"]:
        if device["problem_kind"] is not None and device["uuid"] not in wrong_here:
            name = f"the daemon's GPU {device['gpu']}, {device['model'] or 'model not told'} ({device['uuid']})"
            yield _of_problem(name, _read(device["problem_kind"], device["problem"]), uuid=device["uuid"])


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _read(kind: str, text: str) -> NvmlProblem:
    """A kind of another version's daemon is an error as any."""
    return NvmlProblem(ProblemKind(kind) if kind in set(ProblemKind) else ProblemKind.ERROR, text)


def _of_device(device: NvmlDevice, parts: int) -> Finding:
    facts = {"gpu": device.index, "uuid": device.uuid or None, "parent_uuid": device.parent_uuid}
    what = "instance of GPU" if device.parent_uuid else "GPU"
    name = f"{what} {device.index}, {device.model or 'model not told'} ({device.uuid or 'UUID never told'})"
    if device.problem:
        return _of_problem(name, device.problem, **facts)
    if device.in_mig_mode:
        return Finding(ABOUT, State.WELL, f"{name}: in MIG mode, {parts} instances", facts=facts)
    told = f"{size(device.total_bytes)}, {size(device.free_bytes, 'not told how much')} free"
    users = len(device.processes or ())
    return Finding(
        ABOUT,
        State.WELL,
        f"{name}: {told}, {users} {'process' if users == 1 else 'processes'}",
        facts={**facts, "total_bytes": device.total_bytes, "free_bytes": device.free_bytes},
    )


def _of_problem(name: str, problem: NvmlProblem, **facts: object) -> Finding:
    state = State.NOTE if problem.kind in LASTING else State.WRONG
    return Finding(
        ABOUT, state, f"{name}: {problem.text}", REMEDIES[problem.kind], {**facts, "kind": problem.kind.value}
    )
