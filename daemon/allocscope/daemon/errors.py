"""What keeps a daemon from starting.

DaemonError
├── SocketError     the probes' socket cannot be had
├── GroupError      the socket cannot be given to that group
├── CredentialsError  what is to prove who we are, or who the collector is, cannot be used
├── ListenError     the address of /metrics cannot be had
├── AddressesError  the file of addresses cannot be written
├── ProcError       there are no processes to be seen
└── SpoolError      the spool's folder cannot be used
    └── SpoolTaken  by another daemon
"""

from __future__ import annotations

from pathlib import Path


class DaemonError(Exception):
    """The daemon cannot start; the text says what, with which value, and what to try."""


class SocketError(DaemonError):
    """The probes' socket cannot be had."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot listen for jobs on {path}: {why} (--socket names another)")
        self.path = path


class GroupError(DaemonError):
    """The socket cannot be given to that group."""

    def __init__(self, group: str, why: str) -> None:
        super().__init__(f"cannot give the jobs' socket to the group {group}: {why} (--socket-group names another)")
        self.group = group


class CredentialsError(DaemonError):
    """A certificate, key or token cannot be used, or they do not fit together."""


class ListenError(DaemonError):
    """The address of /metrics cannot be had."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"cannot serve /metrics on {address}: {why} (--metrics-listen names another)")
        self.address = address


class AddressesError(DaemonError):
    """The file of addresses cannot be written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot write the addresses to {path}: {why} (--addresses-file names another)")
        self.path = path


class ProcError(DaemonError):
    """There are no processes to be seen where they are to be looked for."""

    def __init__(self, proc: Path) -> None:
        super().__init__(
            f"cannot see processes in {proc}: there is no {proc}/stat (--proc names another, /proc as a rule)"
        )
        self.proc = proc


class SpoolError(DaemonError):
    """The spool's folder cannot be used."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"cannot keep the spool in {folder}: {why} (--spool names another folder)")
        self.folder = folder


class SpoolTaken(SpoolError):  # noqa: N818 (it is a SpoolError)
    """Another daemon holds it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "another daemon is using it")
