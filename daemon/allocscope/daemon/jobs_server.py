"""`ProbeService` on the jobs' socket."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import aclosing

import grpc
import structlog

from allocscope.daemon.call import Call, CallRefused
from allocscope.daemon.connection import Connection
from allocscope.daemon.door import MOST_CONNECTIONS, Door
from allocscope.daemon.listen import BACKLOG
from allocscope.daemon.peers import Connected, Peer
from allocscope.daemon.service import ProbeService
from allocscope.proto.v1.probe_service_pb2 import AttachRequest

log = structlog.get_logger()

DESCRIPTORS = 4096
"""Four times as many as there may be connections."""
OWN_DESCRIPTORS = 64
"""Of them are left for the daemon's own files and sockets."""
LEAST_CONNECTIONS = 8
ATTACH = "/allocscope.proto.v1.ProbeService/Attach"


class JobsServer:
    """Serves jobs, from `start` to `stop`."""

    def __init__(self, service: ProbeService, peer_of: Callable[[Connected], Peer]) -> None:
        self._service, self._peer_of = service, peer_of
        self._most_connections = _make_room()
        self._door = Door(self._most_connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_stopping = False

    async def start(self, listener: socket.socket) -> None:
        """Serve who connects to a socket that listens, and no more the one before; who came by that stays."""
        if self._server:
            self._server.close()
        backlog = min(BACKLOG, self._most_connections)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._new_connection, sock=listener, backlog=backlog)

    async def stop(self, grace_s: float) -> None:
        """Let nobody else in, give those who are here that long, and hang up."""
        self._is_stopping = True
        if self._server:
            self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for connection in list(self._door.connections):
            connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _new_connection(self) -> Connection:
        return Connection(self._door, self._peer_of, self._serve)

    def _serve(self, path: str, call: Call) -> asyncio.Task[None]:
        if path != ATTACH:
            raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {path[:200]!r} here")
        if self._is_stopping:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, "the daemon is stopping")
        task = asyncio.create_task(self._attach(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _attach(self, call: Call) -> None:
        try:
            async with aclosing(self._service.attach(call.messages(AttachRequest.FromString), call.peer)) as answers:
                async for answer in answers:
                    await call.answer(answer.SerializeToString())
            call.finish(grpc.StatusCode.OK)
        except CallRefused as refused:
            call.finish(refused.code, refused.text)
        except Exception:  # the others' calls go on
            log.exception("a job's call failed", pid=call.peer.pid, uid=call.peer.uid)
            call.finish(grpc.StatusCode.INTERNAL, "this is a defect of the daemon's; its log says more")


def _make_room() -> int:
    """For a descriptor a connection; for how many connections there is some.

    The soft limit is 1,024 on most systems, for the sake of programs that use select(). Where the hard one is low, too, fewer are
    let in: with no descriptor left gRPC ends the process (src/core/lib/iomgr, eventfd).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # Those that wait are all taken at once, before any is turned away.
    most = min(MOST_CONNECTIONS, max((wanted - OWN_DESCRIPTORS) // 2, LEAST_CONNECTIONS))
    if most < MOST_CONNECTIONS:
        log.warning(
            "few descriptors, so few jobs are let in: raise the hard limit (ulimit -Hn)", limit=hard, connections=most
        )
    return most
