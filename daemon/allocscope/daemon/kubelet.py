"""Asks the node's kubelet for its pods: by its PodResources API, a gRPC service on a unix socket, and by its log folders' names."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import grpc

from allocscope.daemon.pods import Holders, PodName, holders, pod_names
from allocscope.daemon.procfs import printable
from allocscope.proto.kubelet.v1.pod_resources_pb2 import ListPodResourcesRequest
from allocscope.proto.kubelet.v1.pod_resources_pb2_grpc import PodResourcesListerStub

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
LOGS = Path("/var/log/pods")
WITHIN_S = 5.0
LARGEST_ANSWER_BYTES = 16 << 20
"""Some thousand pods with a thousand shared devices each stay below."""
MOST_LOG_FOLDERS = 4096


class KubeletError(Exception):
    """It does not say; the text is for people."""


class PodSource(Protocol):
    """Who knows of pods."""

    @property
    def is_there(self) -> bool:
        """Whether there is anybody to ask; where that may not be seen, too."""
        ...

    def holders(self) -> Holders:
        """Which container was given which device. May wait; KubeletError."""
        ...

    def names(self) -> dict[str, PodName]:
        """The pods' names by UID; empty where that is not to be read."""
        ...


class Kubelet:
    """The kubelet of this node. Each question is a connection of its own: they are rare, and a kubelet may have been restarted."""

    def __init__(self, socket: Path = SOCKET, logs: Path = LOGS, *, within_s: float = WITHIN_S) -> None:
        self._socket, self._logs, self._within_s = socket, logs, within_s

    @property
    def is_there(self) -> bool:
        """Whether it has a socket here; also where that may not be seen."""
        try:
            return self._socket.exists()
        except OSError:  # the kubelet's folder is root's
            return True

    def holders(self) -> Holders:
        """Which container was given which device. KubeletError."""
        # Go's servers refuse the authority that is made of a socket's path.
        options = [
            ("grpc.max_receive_message_length", LARGEST_ANSWER_BYTES),
            ("grpc.default_authority", "localhost"),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # else it may be refused for what was found the last time
        ]
        with grpc.insecure_channel(f"unix:{self._socket.absolute()}", options=options) as channel:
            try:
                return holders(PodResourcesListerStub(channel).List(ListPodResourcesRequest(), timeout=self._within_s))
            except grpc.RpcError as error:
                raise KubeletError(self._told(cast("grpc.Call", error))) from error

    def names(self) -> dict[str, PodName]:
        """The pods' names by UID; empty where there are no folders, or they are not to be read."""
        try:
            with os.scandir(self._logs) as found:
                return pod_names(entry.name for entry in islice(found, MOST_LOG_FOLDERS))
        except OSError:
            return {}

    def _told(self, error: grpc.Call) -> str:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            why = f"no answer within {self._within_s:g} s"
        else:
            why = printable(error.details() or error.code().name)[:300]
        return f"the kubelet does not tell of its pods at {self._socket}: {why}"
