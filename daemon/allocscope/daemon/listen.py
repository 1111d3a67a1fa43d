"""The unix socket that jobs connect to: who may, and what becomes of one that is there already."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path
from urllib.parse import quote

import grpc

from allocscope.daemon.errors import GroupError, SocketError
from allocscope.daemon.service import MOST_STREAMS, ProbeService
from allocscope.proto.v1.probe_service_pb2_grpc import add_ProbeServiceServicer_to_server

LARGEST_MESSAGE_BYTES = (2 << 20) + 4096
"""A probe's largest message is 2 MiB. What is larger ends its stream, and is not read into memory."""
LONGEST_SOCKET_PATH = 107
"""sockaddr_un.sun_path, its closing NUL left out."""


def new_server(service: ProbeService) -> grpc.aio.Server:
    """A server that has no address yet."""
    options = [
        ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_STREAMS)
    add_ProbeServiceServicer_to_server(service, server)
    return server


def bind(server: grpc.aio.Server, path: Path, *, group: str | None = None, mode: int = 0o660) -> None:
    """Give the server its socket; one that a dead daemon left is replaced. Who may report is who may write to it."""
    group_id = _group_id(group) if group else None
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise SocketError(path, f"the path is longer than {LONGEST_SOCKET_PATH} bytes, the system's limit")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path)
        server.add_insecure_port(f"unix:{quote(os.fspath(path))}")
        if group and group_id is not None:
            _give(path, group, group_id)
        path.chmod(mode)
    except FileExistsError as error:
        raise SocketError(path, f"{path.parent} is no folder") from error
    except RuntimeError as error:
        raise SocketError(path, "the system does not let us") from error
    except OSError as error:
        raise SocketError(path, error.strerror or str(error)) from error


def _group_id(group: str) -> int:
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise GroupError(group, "there is no such group") from error


def _give(path: Path, group: str, group_id: int) -> None:
    try:
        os.chown(path, -1, group_id)
    except (OSError, OverflowError) as error:
        path.unlink(missing_ok=True)
        raise GroupError(group, getattr(error, "strerror", None) or str(error)) from error


def _clear(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SocketError(path, "there is a file of that name, which is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(2)
        try:
            attempt.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise SocketError(path, "another daemon listens there")
