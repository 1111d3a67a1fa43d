"""Which pod a process is of, from what the kubelet says of the node's devices and pods. Pure.

The kubelet's API names pods by namespace and name and knows which devices each container was given; a process's cgroup names its
pod by UID, and the API does not tell UIDs. So a process is joined to a pod by its device only where something of its own says the
same: the name of its container, or its host name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from allocscope.proto.kubelet.v1.pod_resources_pb2 import ListPodResourcesResponse

MOST_DEVICE_IDS = 65_536
"""Of all pods of a node; a shared device has one for each share."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
"""RFC 1123, as Kubernetes asks of the names of pods, namespaces and containers."""
_DEVICE = re.compile(r"((?:GPU|MIG)-[A-Za-z0-9/-]{1,90})(?:::\d+)?")
"""By UUID; "::N" is the device plugin's for the shares of a device. By index, as some plugins can be told to: not joined."""
_LOG_FOLDER = re.compile(r"([a-z0-9-]{1,63})_([a-z0-9.-]{1,253})_([0-9a-f]{32}|[0-9a-f-]{36})")
"""pkg/kubelet/kuberuntime/helpers.go, BuildPodLogsDirectory; none of the three may have an underscore."""
_TERMINATION_LOG = re.compile(r"/pods/([0-9a-f-]{32,36})/containers/([a-z0-9-]{1,63})/[0-9a-f]{8}(?: |$)")
"""pkg/kubelet/kubelet_pods.go: what the kubelet mounts into every container for its last words."""


class PodName(NamedTuple):
    """A pod."""

    namespace: str
    pod: str


class Holder(NamedTuple):
    """A container that was given a device."""

    name: PodName
    container: str


Holders = Mapping[str, tuple[Holder, ...]]
"""By the device's UUID."""


def holders(response: ListPodResourcesResponse) -> Holders:
    """Who was given which device; what is no name or no UUID is passed over."""
    found: dict[str, dict[Holder, None]] = {}
    left = MOST_DEVICE_IDS
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Holder(PodName(pod.namespace, pod.name), container.name)
            if not all(map(_NAME.fullmatch, (*holder.name, holder.container))):
                continue
            for id_ in (id_ for devices in container.devices for id_ in devices.device_ids):
                left -= 1
                if left < 0:
                    return _frozen(found)
                if told := _DEVICE.fullmatch(id_):
                    found.setdefault(told[1], {})[holder] = None
    return _frozen(found)


def _frozen(found: Mapping[str, Mapping[Holder, None]]) -> Holders:
    return {uuid: tuple(by) for uuid, by in found.items()}


def pod_of(devices: Iterable[str], given: Holders, *, container: str | None, host_name: str | None) -> Holder | None:
    """Whose a process is that uses these devices; None: nothing of its own says so, or it could be several.

    `container` and `host_name` are what is known of the process itself. With neither it may be anybody's: a privileged pod
    uses devices that were given to others.
    """
    candidates = {holder for uuid in devices for holder in given.get(uuid, ())}
    if container is not None:
        candidates = {holder for holder in candidates if holder.container == container}
    namesakes = {holder for holder in candidates if holder.name.pod == host_name}
    if container is None or namesakes:  # a pod may have been given another host name than its own
        candidates = namesakes
    return candidates.pop() if len(candidates) == 1 else None


def pod_names(log_folders: Iterable[str]) -> dict[str, PodName]:
    """By UID, from the names of the kubelet's log folders (/var/log/pods): NAMESPACE_POD_UID."""
    told = map(_LOG_FOLDER.fullmatch, log_folders)
    return {found[3]: PodName(found[1], found[2]) for found in told if found}


def container_name(mountinfo: str, pod_uid: str) -> str | None:
    """The name of a process's container within its pod, from the text of /proc/PID/mountinfo.

    The kubelet mounts a file of its own into every container, and the file's path on the node names pod and container.
    """
    named = (found for line in mountinfo.split("\n") if (found := _TERMINATION_LOG.search(line)))
    return next((found[2] for found in named if found[1] == pod_uid), None)
