"""Where a process belongs, as the names of its cgroups tell: the container, the Kubernetes pod, the Slurm job. Pure.

A cgroup's path is made of names that runtimes give; whoever is handed a part of the tree may make others below it. So of pods and
Slurm jobs the outermost name is taken, which is the node's own, and nothing of them from what systemd hands to users.

Sources: runc's and crun's systemd drivers (SLICE/PREFIX-ID.scope), kubelet pkg/kubelet/cm/cgroup_manager_linux.go and
qos_container_manager_linux.go, containerd's CRI (which writes SLICE:cri-containerd:ID where the two drivers disagree), cri-o,
podman's libpod, cgroup_namespaces(7) for "/..".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from allocscope.daemon import slurm
from allocscope.daemon.slurm import SlurmStep

_CONTAINER = re.compile(r"(?:(?P<prefix>[a-z][a-z0-9-]*)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_POD = re.compile(r"(?:.*-)?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?")
"""A static pod's UID is a hash, without dashes."""
_WATCHERS = ("conmon", "crio-conmon", "libpod-conmon")
"""Processes beside a container, not in it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What cgroups tell of a process; None: nothing."""

    container_id: str | None = None
    """The innermost container's."""
    pod_uid: str | None = None
    """With dashes, as the API server has it."""
    slurm: SlurmStep = field(default_factory=SlurmStep)


def place(cgroup: str) -> Place:
    """From the text of /proc/PID/cgroup: of version 1 a line for each hierarchy, of version 2 one, of both as in hybrid set-ups."""
    places = [_place_in(path) for path in _paths(cgroup)]
    return Place(
        next((it.container_id for it in places if it.container_id), None),
        next((it.pod_uid for it in places if it.pod_uid), None),
        slurm.fullest(it.slurm for it in places),
    )


def _paths(cgroup: str) -> Iterator[str]:
    """Without repetition, since a dozen hierarchies often say the same."""
    told = (line.split(":", 2) for line in cgroup.split("\n"))
    # The kernel writes " (deleted)" behind a cgroup that was removed while the process was still in it.
    yield from dict.fromkeys(parts[2].removesuffix(" (deleted)") for parts in told if len(parts) == 3)


def _place_in(path: str) -> Place:
    names = [name for name in path.split("/") if name]
    is_relative = names[:1] == [
        ".."
    ]  # seen from a cgroup namespace: what encloses the nearest common cgroup is not told
    names = [name for name in names if name != ".."]
    container_id = next((found for name in reversed(names) for found in _container(name)), None)
    if names[:1] == ["user.slice"]:
        return Place(container_id)
    return Place(
        container_id, _pod_uid(names, is_relative=is_relative), slurm.of_cgroup(names, is_relative=is_relative)
    )


def _container(name: str) -> Iterator[str]:
    """ "docker-ID.scope", "ID", "libpod-payload-ID", and the last of "SLICE:cri-containerd:ID"."""
    found = _CONTAINER.fullmatch(name.rpartition(".slice:")[2])
    if found and found["prefix"] not in _WATCHERS:
        yield found["id"]


def _pod_uid(names: Iterable[str], *, is_relative: bool) -> str | None:
    in_pods = is_relative
    for name in names:
        in_pods = in_pods or "kubepods" in name
        if in_pods and (found := _POD.fullmatch(name.partition(":")[0])):
            return found[1].replace("_", "-")
    return None
