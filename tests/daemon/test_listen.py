"""The jobs' socket: whose it is and who may connect, from the first moment on; and what others may have put in its place."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocscope.daemon import listen as module
from allocscope.daemon.errors import GroupError, SocketError
from allocscope.daemon.listen import JobsSocket, Listener, listen


@pytest.fixture
def folder() -> Iterator[Path]:
    """A socket's path is short or impossible."""
    with tempfile.TemporaryDirectory(prefix="as-") as name:
        yield Path(name)


@pytest.fixture
def listening() -> Iterator[list[Listener]]:
    made: list[Listener] = []
    yield made
    for each in made:
        each.socket.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o660, 0o600, 0o666])
def test_its_rights_are_as_told_whatever_the_umask_is(folder, listening, umask, mode):
    before = os.umask(umask)
    try:
        listening.append(listen(folder / "s", mode=mode))
    finally:
        os.umask(before)
    assert (folder / "s").stat().st_mode & 0o777 == mode


def test_nobody_can_connect_before_its_rights_are_set(folder, listening, monkeypatch):
    seen = []

    def give(path: Path, *more):
        seen.append(path.stat().st_mode & 0o777)
        with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
            early.connect(os.fspath(path))
        return real(path, *more)

    real = module._give
    monkeypatch.setattr(module, "_give", give)
    before = os.umask(0)
    try:
        listening.append(listen(folder / "s", mode=0o660))
    finally:
        os.umask(before)
    assert seen == [0o600]


@pytest.mark.parametrize("name", ["link", "dangling"])
def test_a_link_in_its_place_is_not_followed(folder, name):
    (folder / "secret").write_text("secret")
    (folder / "secret").chmod(0o600)
    target = folder / ("secret" if name == "link" else "none")
    (folder / "s").symlink_to(target)
    with pytest.raises(SocketError, match="there is a file of that name, which is no socket"):
        listen(folder / "s", mode=0o666)
    assert (folder / "s").is_symlink()
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_what_is_exchanged_for_it_in_the_last_moment_is_neither_opened_nor_given_away(folder, monkeypatch):
    """Where others may write to the folder."""
    (folder / "secret").write_text("secret")
    (folder / "secret").chmod(0o600)

    def swapped(path: Path, *more):
        path.unlink()
        path.symlink_to(folder / "secret")
        return real(path, *more)

    real = module._give
    monkeypatch.setattr(module, "_give", swapped)
    with pytest.raises(SocketError):
        listen(folder / "s", group=str(os.getegid()), mode=0o666)
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600


def test_only_its_own_file_is_taken_away_at_the_end(folder, listening):
    listening.append(listen(folder / "s"))
    (folder / "s").unlink()
    listening.append(listen(folder / "s"))
    listening[0].unlink()
    assert (folder / "s").is_socket()
    listening[1].unlink()
    assert not (folder / "s").exists()


def test_another_daemons_socket_is_left_alone_also_where_it_is_too_busy_to_answer(folder, listening, monkeypatch):
    monkeypatch.setattr(module, "BACKLOG", 4)
    listening.append(listen(folder / "s"))
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(module.BACKLOG + 1)]
    try:
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(os.fspath(folder / "s"))
        with pytest.raises(SocketError, match="another daemon listens there, and takes no connection: is it stopped"):
            listen(folder / "s")
    finally:
        for each in waiting:
            each.close()
    assert (folder / "s").is_socket()


async def test_a_socket_that_was_taken_away_is_made_anew_with_its_folder_and_rights(folder, listening):
    served = []

    async def serve(listener: socket.socket) -> None:
        served.append(listener)

    jobs = JobsSocket(folder / "run" / "s", serve, mode=0o666)
    await jobs.open()
    await jobs.look_after(1)
    assert len(served) == 1, "while it is there nothing is done"
    shutil.rmtree(folder / "run")
    await jobs.look_after(2)
    assert (folder / "run" / "s").stat().st_mode & 0o777 == 0o666
    with socket.socket(socket.AF_UNIX) as job:
        job.connect(os.fspath(folder / "run" / "s"))
        served[1].accept()[0].close()
    jobs.unlink()
    assert not (folder / "run" / "s").exists()
    for each in served:
        each.close()


async def test_where_it_cannot_be_made_anew_it_is_tried_again_after_a_while(folder, listening):
    served = []

    async def serve(listener: socket.socket) -> None:
        served.append(listener)

    jobs = JobsSocket(folder / "s", serve)
    await jobs.open()
    (folder / "s").unlink()
    listening.append(listen(folder / "s"))  # another daemon's by now
    await jobs.look_after(1)
    listening[0].unlink()
    await jobs.look_after(10.9)
    assert not (folder / "s").exists()
    await jobs.look_after(11)
    assert (folder / "s").is_socket()
    for each in served:
        each.close()


def test_a_group_that_is_not_ours_to_give_leaves_no_socket_behind(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(GroupError, match="cannot give the jobs' socket to the group 7: Operation not permitted"):
        listen(folder / "s", group="7")
    assert not (folder / "s").exists()


def test_a_group_that_there_is_not_is_told_before_anything_is_made(folder):
    with pytest.raises(GroupError, match="there is no such group"):
        listen(folder / "deep" / "s", group="no-such-group")
    assert not (folder / "deep").exists()
