"""Whose a process is, in a few words for people, from what a collector's API tells of it."""

from __future__ import annotations

from allocscope.cli.ask import Json
from allocscope.cli.capture_owner import printable

SHORT_ID = 12
"""Digits of a container's id, as `docker ps` shows it."""


def owner_text(owner: Json | None) -> str:
    """`pod team-a/llama-worker-0 (trainer), user ann`; "" where nothing is known."""
    told = (_place(owner), _slurm(owner), _part("user", owner.get("user"))) if owner else ()
    return ", ".join(filter(None, told))


def process_text(process: Json) -> str:
    """`python3 (container a864ed013d12, user ann)`; one without a name by its pid."""
    name = printable(process["name"]) if process["name"] else f"pid {process['pid']}"
    whose = owner_text(process.get("owner"))
    return f"{name} ({whose})" if whose else name


def _place(owner: Json) -> str:
    container = f" ({printable(owner['container'])})" if owner.get("container") else ""
    if owner.get("pod"):
        return f"pod {printable(owner.get('namespace'))}/{printable(owner['pod'])}{container}"
    if owner.get("pod_uid"):
        return f"pod {printable(owner['pod_uid'])}{container}"
    return _part("container", (owner.get("container_id") or "")[:SHORT_ID])


def _slurm(owner: Json) -> str:
    step = f".{printable(owner['slurm_step'])}" if owner.get("slurm_step") else ""
    return _part("Slurm", owner.get("slurm_job")) + step if owner.get("slurm_job") else ""


def _part(what: str, value: str | None) -> str:
    return f"{what} {printable(value)}" if value else ""
