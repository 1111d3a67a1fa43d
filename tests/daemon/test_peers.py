"""A job can report only for itself: its process, and where that is not told its user, is known from the kernel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from allocscope.daemon import claims, peers
from allocscope.daemon.node import Node
from allocscope.daemon.peers import Peer, Peers
from allocscope.daemon.procfs import HostProcess, Procfs
from allocscope.model.captures import NOTE_SUFFIX, UNFINISHED_SUFFIX
from allocscope.model.wire import WireError, note_to_wire, process_to_wire
from tests.daemon.capture_fakes import ID, folder_of, note
from tests.daemon.fakes import DaemonProcess, FakeProbe, process, sample
from tests.daemon.stranger import Stranger

NOBODY = 65534
A = "a" * 32
HIDDEN = Peer(uid=1000, gid=1000)
KNOWN = Peer(1000, 1000, 4711, HostProcess(4711, own_pid=7, uids=frozenset({1000})), start_ticks=99)


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with tempfile.TemporaryDirectory(prefix="as-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen()
        yield listener, f"{folder}/s"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users get into."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


# what the kernel tells


def test_a_process_that_cannot_be_read_for_a_moment_is_not_gone(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text(f"{os.getpid()} (daemon) S 1")
    (tmp_path / "4711").mkdir()  # as while no descriptor is left: it is there, and cannot be opened
    told = Peers(Procfs(tmp_path))
    assert told.is_alive(KNOWN) is None
    (tmp_path / "4711").rmdir()
    assert told.is_alive(KNOWN) is False


def test_who_connected_is_known_by_process_user_and_group():
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        peer = Peers(Procfs()).of(here)
    assert (peer.pid, peer.uid, peer.gid, peer.own_pid) == (os.getpid(), os.geteuid(), os.getegid(), os.getpid())
    assert peer.uids == {os.geteuid()}
    assert Peers(Procfs()).is_alive(peer) is True


def test_of_one_that_has_ended_its_user_is_known_and_not_what_proc_says_of_its_number(monkeypatch):
    """By the time its connection is taken another process may have its pid."""
    with listening() as (listener, path):
        code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(b'hello')"
        done = subprocess.run([sys.executable, "-c", code, path], check=True)
        assert done.returncode == 0
        connection, _ = listener.accept()
        with connection:
            peer = Peers(Procfs()).of(connection)
    assert (peer.uid, peer.host, peer.own_pid, peer.start_ticks) == (os.geteuid(), None, None, None)


def test_a_proc_of_another_pid_namespace_is_not_asked(tmp_path):
    """There a pid is another process's."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text("17 (python) S 1")
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        asked = Peers(Procfs(tmp_path))
        peer = asked.of(here)
    assert (peer.pid, peer.host) == (os.getpid(), None)
    assert peer.uids == {os.geteuid()}
    assert asked.problem == "/proc is of another pid namespace than this daemon, or is not there"


def test_a_process_of_another_pid_namespace_is_known_by_its_user(monkeypatch):
    class FromElsewhere:
        def getsockopt(self, level: int, name: int, buflen: int, /) -> bytes:
            assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
            return peers.CREDENTIALS.pack(0, 1000, 1000)

    assert Peers(Procfs()).of(FromElsewhere()) == Peer(uid=1000, gid=1000)


def test_a_process_that_has_ended_is_not_taken_for_a_later_one_of_its_pid():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        told = Peers(Procfs())
        here, there = socket.socketpair(socket.AF_UNIX)
        with here, there:
            this = told.of(here)
        assert told.is_alive(replace(this, pid=child.pid)) is False  # it began after this one
        child.communicate()
    assert told.is_alive(replace(this, pid=child.pid)) is False
    assert told.is_alive(Peer(uid=1000, gid=1000)) is None


# what may be said


@pytest.mark.parametrize(
    ("peer", "pid"),
    [
        pytest.param(KNOWN, 7, id="its pid in its own eyes"),
        pytest.param(HIDDEN, 12, id="of another pid namespace, any"),
        pytest.param(replace(KNOWN, host=None), 12, id="hidden in /proc, any"),
        pytest.param(replace(KNOWN, host=HostProcess(4711)), 12, id="of a kernel without NSpid, any"),
    ],
)
def test_a_hello_is_of_the_process_that_connected(peer, pid):
    claims.check_peer(process(pid=pid), peer)


@pytest.mark.parametrize("pid", [8, 4711])
def test_a_hello_of_another_process_is_refused(pid):
    with pytest.raises(WireError) as caught:
        claims.check_peer(process(pid=pid), KNOWN)
    assert (caught.value.reason, str(caught.value)) == (
        "foreign_pid",
        f"a hello of pid {pid} on a connection of pid 7's",
    )


@pytest.mark.parametrize(
    ("before", "after", "may"),
    [
        pytest.param(KNOWN, KNOWN, True, id="the same process"),
        pytest.param(KNOWN, replace(KNOWN, uid=0), True, id="the same process as another user"),
        pytest.param(KNOWN, replace(KNOWN, pid=4712), False, id="another process"),
        pytest.param(KNOWN, replace(KNOWN, start_ticks=100), False, id="a later process of the same pid"),
        pytest.param(KNOWN, replace(KNOWN, start_ticks=None), True, id="it has ended by now"),
        pytest.param(HIDDEN, HIDDEN, True, id="one of the user's, which is all that is known"),
        pytest.param(HIDDEN, replace(HIDDEN, uid=1001), False, id="another user's"),
        pytest.param(KNOWN, HIDDEN, True, id="hidden now"),
        pytest.param(KNOWN, replace(HIDDEN, uid=1001), False, id="hidden now, another user's"),
    ],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_process_id_stays_the_process_s_that_had_it(before, after, may, is_gone):
    node = Node()
    node.attach(process(), process_to_wire(process()), "stream", 0.0, before)
    if is_gone:
        node.detach("stream", 1.0)
        node.retire(100.0, gone_after_s=30, silent_after_s=300, is_alive=lambda _: None)
        assert len(node) == 0
    if may:
        node.attach(process(), process_to_wire(process()), "another stream", 101.0, after)
        return
    with pytest.raises(WireError) as caught:
        node.attach(process(), process_to_wire(process()), "another stream", 101.0, after)
    assert caught.value.reason == "process_id_taken"


# through a daemon


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_job_of_another_user_can_speak_for_itself_and_for_nobody_else(open_folder):
    with DaemonProcess(open_folder, socket_mode="0666") as daemon:
        own = FakeProbe(daemon.socket, process())
        own.samples(sample(1))
        own.wait_acknowledged(1)
        with Stranger(daemon.socket, "b" * 32, uid=NOBODY) as job:
            assert job.answer() == {"refused": [], "acknowledged": 1}
        with Stranger(daemon.socket, A, uid=NOBODY) as thief:
            assert thief.answer()["refused"][0].startswith(f"process id {A} is that of pid {os.getpid()}, not of pid ")
        with Stranger(daemon.socket, "c" * 32, uid=NOBODY, pid=os.getpid()) as thief:
            assert thief.answer()["refused"][0] == (
                f"a hello of pid {os.getpid()} on a connection of pid {thief.pid}'s"
            )
        own.samples(sample(2))
        own.wait_acknowledged(2)
        rejected = daemon.figures("allocscope_samples_rejected_total")
        assert rejected['allocscope_samples_rejected_total{reason="foreign_pid"}'] == 1
        assert rejected['allocscope_samples_rejected_total{reason="process_id_taken"}'] == 1
        own.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(("mode", "closed"), [("0660", "Permission denied"), ("0600", "Permission denied")])
def test_who_is_not_of_the_socket_s_group_cannot_report(open_folder, mode, closed):
    with DaemonProcess(open_folder, socket_mode=mode, socket_group="daemon") as daemon:
        with Stranger(daemon.socket, A, uid=NOBODY) as stranger:
            assert stranger.answer() == {"closed": closed}
        assert daemon.figures("allocscope_samples_ingested_total") == {"allocscope_samples_ingested_total": 0}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_who_is_of_the_socket_s_group_can(open_folder):
    with DaemonProcess(open_folder, socket_group=NOBODY) as daemon, Stranger(daemon.socket, A, uid=NOBODY) as member:
        assert member.answer() == {"refused": [], "acknowledged": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_what_another_user_leaves_is_no_capture_of_a_job_wherever_that_runs(open_folder):
    """The job's host name is a container's, so that /proc alone could not tell whose it is."""
    with DaemonProcess(open_folder) as daemon:
        job = FakeProbe(daemon.socket, process(host="elsewhere"))
        job.samples(sample(1))
        job.wait_acknowledged(1)
        part = folder_of(daemon) / f".{ID}{NOTE_SUFFIX}{UNFINISHED_SUFFIX}"
        part.write_bytes(note_to_wire(note(process(host="elsewhere"))).SerializeToString())
        os.chown(part, NOBODY, NOBODY)
        part.rename(folder_of(daemon) / f"{ID}{NOTE_SUFFIX}")
        lost = daemon.wait_log("capture lost")
        assert lost["reason"] == "foreign_owner"
        job.end()


def test_a_job_in_a_pid_namespace_of_its_own_is_known_by_its_pid_there(open_folder):
    """As a container has it: it calls itself 1, and the daemon sees its host's pid."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespaces here")
    with (
        DaemonProcess(open_folder) as daemon,
        Stranger(daemon.socket, A, within=unshare) as job,
        Stranger(daemon.socket, "b" * 32, within=unshare, pid=7) as liar,
    ):
        assert job.answer() == {"refused": [], "acknowledged": 1}
        assert liar.answer()["refused"][0] == "a hello of pid 7 on a connection of pid 1's"
