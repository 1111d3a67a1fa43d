"""Of whom something may still come, and whose a note can be: by the node's streams, and by /proc where that can tell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from allocscope.daemon.devices import Devices
from allocscope.daemon.node import Node
from allocscope.daemon.notes import ReadNote
from allocscope.daemon.peers import Peer
from allocscope.daemon.presence import Presence
from allocscope.daemon.procfs import Procfs
from allocscope.model import Process
from allocscope.model.wire import WireError, note_to_wire, process_to_wire
from tests.daemon.capture_fakes import dead_process, note
from tests.daemon.fakes import Clock, process

A = "a" * 32


@pytest.fixture
def clock():
    return Clock()


class Here:
    """A node, and what /proc says."""

    def __init__(self, clock: Clock, alive: bool | None) -> None:
        self.node, self.clock = Node(), clock
        self.presence = Presence(self.node, is_alive=lambda _: alive, owners=lambda _: frozenset(), clock=clock)

    def attach(self) -> None:
        self.node.attach(process(), process_to_wire(process()), "stream", self.clock())

    def is_gone(self, *, known: bool = True, since_s: float = 1000.0) -> bool:
        return self.presence.is_gone(A, since_s, process() if known else None)


@pytest.mark.parametrize("alive", [None, True, False])
def test_a_process_with_a_stream_is_there(clock, alive):
    here = Here(clock, alive)
    here.attach()
    clock.now_s += 1000
    assert not here.is_gone()


@pytest.mark.parametrize(("alive", "gone"), [(True, False), (False, True)])
def test_where_proc_can_tell_it_is_believed(clock, alive, gone):
    here = Here(clock, alive)
    assert here.is_gone() is gone
    here.attach()
    here.node.detach("stream", clock())
    assert here.is_gone(known=False) is gone
    here.node.retire(5000, gone_after_s=1, silent_after_s=1, is_alive=lambda _: False)
    assert here.is_gone(known=False) is gone


def test_where_nothing_can_tell_a_process_is_given_the_time_to_come_again(clock):
    here = Here(clock, None)
    for begins in (lambda: None, here.attach, lambda: here.node.detach("stream", clock())):
        begins()
        clock.now_s += 9
        assert not here.is_gone(known=False)
    clock.now_s += 2
    assert here.is_gone(known=False)
    assert here.is_gone(known=True)


def test_what_was_asked_for_just_now_is_given_time_too(clock):
    here = Here(clock, None)
    clock.now_s += 1000
    assert here.is_gone(since_s=1989)
    assert not here.is_gone(since_s=1991)


# whose a note is


def read(whose: Process, uid: int) -> ReadNote:
    left = note(whose)
    return ReadNote(note_to_wire(left), left, uid)


def presence(node: Node, owners: frozenset[int] = frozenset()) -> Presence:
    return Presence(node, is_alive=lambda _: None, owners=lambda _: owners)


@pytest.mark.parametrize(
    ("owners", "uid"),
    [
        pytest.param({1000}, 1000, id="its own"),
        pytest.param({1000, 1001}, 1001, id="one of its own"),
        pytest.param({1000}, 0, id="root's"),
        pytest.param(set(), 1000, id="nobody can tell"),
    ],
)
def test_a_note_that_can_be_its_processs_is_taken(owners, uid):
    presence(Node(), frozenset(owners)).check(read(process(), uid))


def test_a_note_of_another_user_is_refused():
    with pytest.raises(WireError) as caught:
        presence(Node(), frozenset({1000, 1001})).check(read(process(pid=7), 1002))
    assert (caught.value.reason, str(caught.value)) == (
        "foreign_owner",
        "the note is user 1002's, pid 7 is user 1000's",
    )


def test_a_note_of_another_process_by_that_id_is_refused():
    node = Node()
    node.attach(process(pid=8), process_to_wire(process(pid=8)), "stream", 1)
    with pytest.raises(WireError) as caught:
        presence(node).check(read(process(pid=7), 1))
    assert (caught.value.reason, str(caught.value)) == ("process_id_taken", f"process id {A} is that of pid 8")


def test_whose_a_process_is_that_reported_is_the_kernels_word_wherever_it_runs():
    node, elsewhere = Node(), process(host="elsewhere", pid=7)
    node.attach(elsewhere, process_to_wire(elsewhere), "stream", 1, Peer(uid=1000, gid=1000))
    assert Devices(node, Procfs()).owners(elsewhere) == frozenset({1000})


def test_this_machines_proc_tells_whose_a_process_is():
    devices = Devices(Node(), Procfs())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mine = process(host=os.uname().nodename, pid=child.pid, started_us=4 * 10**15)
        assert devices.owners(mine) == frozenset({os.getuid()})
        assert devices.owners(process(host="elsewhere", pid=child.pid, started_us=4 * 10**15)) == frozenset()
        assert devices.owners(process(host=os.uname().nodename, pid=child.pid, started_us=1)) == frozenset()
        assert devices.owners(dead_process()) == frozenset()
    finally:
        child.communicate(b"\n", timeout=20)
