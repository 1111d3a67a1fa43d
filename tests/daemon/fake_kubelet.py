"""A kubelet's PodResources API, served over a socket from its own proto."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc

from allocscope.daemon.pods import Holder, PodName
from allocscope.proto.kubelet.v1 import pod_resources_pb2_grpc
from allocscope.proto.kubelet.v1.pod_resources_pb2 import (
    ContainerDevices,
    ContainerResources,
    ListPodResourcesResponse,
    PodResources,
)

WORKER = PodResources(
    name="llama-worker-0",
    namespace="team-a",
    containers=[
        ContainerResources(
            name="trainer", devices=[ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["GPU-1"])]
        )
    ],
)
GIVEN = {"GPU-1": (Holder(PodName("team-a", "llama-worker-0"), "trainer"),)}


class Lister(pod_resources_pb2_grpc.PodResourcesListerServicer):
    def __init__(self, *pods: PodResources) -> None:
        self.pods = pods

    def List(self, request, context):
        return ListPodResourcesResponse(pod_resources=self.pods)


@contextmanager
def kubelet(socket: Path, *handlers: grpc.GenericRpcHandler, lister: Lister | None = None) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=list(handlers))
    if lister is not None:
        pod_resources_pb2_grpc.add_PodResourcesListerServicer_to_server(lister, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait(10)
        with suppress(FileNotFoundError):
            socket.unlink()
