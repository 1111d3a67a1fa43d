"""One stream to the daemon: everything arrives, in order, whatever the daemon does; the caller never waits."""

import grp
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allocscope.model import (
    AllocatorRef,
    BlockGroup,
    BlockMap,
    CaptureOrder,
    Device,
    Event,
    EventKind,
    Intervals,
    Pool,
    Process,
    Sample,
    SizeClass,
)
from allocscope.probe import messages
from allocscope.probe import uplink as uplink_module
from allocscope.probe.uplink import Uplink
from tests.probe.receiver import LONG_S, Receiver

PROCESS = Process(process_id="a1" * 16, job="train", pid=7, host="node", started_us=1)
REF, OTHER_REF = AllocatorRef(PROCESS.process_id, "GPU-1"), AllocatorRef(PROCESS.process_id, "GPU-2")
GROUP = BlockGroup(
    pool=Pool.LARGE, stream=0, private_pool=None, expandable=False, segment_count=1, reserved_bytes=10,
    requested_bytes=6, rounding_bytes=1, allocated_bytes=7, awaiting_free_bytes=0, stranded_bytes=3, releasable_bytes=0,
    private_bytes=0, free_stranded=(SizeClass(3, 1, 3, 3),), free_releasable=(), live=(SizeClass(6, 1, 6, 6),),
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


@pytest.fixture
def uplink(path: Path) -> Iterator[Uplink]:
    made = Uplink(str(path), PROCESS)
    yield made
    made.close(0)


def sample(uplink: Uplink, ref: AllocatorRef = REF, **known: int) -> int:
    sequence = uplink.next_sequence()
    uplink.sample(ref, Sample(sequence, 1000 + sequence, **(known or {"allocated_bytes": sequence})))
    return sequence


def block_map(uplink: Uplink) -> int:
    sequence = uplink.next_sequence()
    uplink.block_map(REF, BlockMap(sequence, 1000 + sequence, (GROUP,)))
    return sequence


def event(uplink: Uplink) -> int:
    sequence = uplink.next_sequence()
    uplink.event(Event(PROCESS.process_id, sequence, 1000 + sequence, EventKind.OOM, requested_bytes=5))
    return sequence


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name == "allocscope-uplink"}


def test_all_arrives_whole_and_in_order_after_the_hello(path, uplink):
    for hand_on in (sample, block_map, event):
        hand_on(uplink)
    with Receiver(path) as receiver:
        uplink.start()
        assert uplink.close(LONG_S) == 0
    assert receiver.kinds() == ["hello", "samples", "block_map", "event"]
    assert receiver.hellos() == [PROCESS]
    assert receiver.samples() == [Sample(1, 1001, allocated_bytes=1)]
    assert receiver.block_maps() == [BlockMap(2, 1002, (GROUP,))]
    assert receiver.events() == [Event(PROCESS.process_id, 3, 1003, EventKind.OOM, requested_bytes=5)]
    assert threads() == set()


def test_a_daemon_that_starts_late_gets_all_of_it(path, uplink):
    uplink.start()
    for _ in range(3):
        sample(uplink)
    with Receiver(path) as receiver:
        receiver.wait_for(lambda: receiver.numbers() == [1, 2, 3])


def test_a_backlog_of_one_allocator_goes_in_one_message(path, uplink):
    for ref in (REF, REF, REF, OTHER_REF, OTHER_REF, REF):
        sample(uplink, ref)
    with Receiver(path) as receiver:
        uplink.start()
        assert uplink.close(LONG_S) == 0
    chunks = [list(r.samples.sequence) for r in receiver.requests() if r.HasField("samples")]
    assert chunks == [[1, 2, 3], [4, 5], [6]]


def test_what_a_restarted_daemon_had_not_acknowledged_is_sent_again_after_a_hello(path, uplink):
    uplink.start()
    with Receiver(path, acknowledges=False) as first:
        for hand_on in (sample, block_map, event):
            hand_on(uplink)
        first.wait_for(lambda: first.numbers() == [1, 2, 3])
    sample(uplink)
    with Receiver(path) as second:
        assert uplink.close(LONG_S) == 0
    assert second.numbers() == [1, 2, 3, 4]
    assert second.kinds()[0] == "hello"


def test_what_was_acknowledged_is_not_sent_again(path, uplink):
    uplink.start()
    with Receiver(path) as first:
        sample(uplink)
        first.wait_for(first.numbers)
        wait_until_empty(uplink)
    with Receiver(path) as second:
        sample(uplink)
        assert uplink.close(LONG_S) == 0
    assert second.numbers() == [2]


def wait_until_empty(uplink: Uplink) -> None:
    with uplink._changed:
        assert uplink._changed.wait_for(lambda: len(uplink._ring) == 0, LONG_S)


def test_a_daemon_that_never_answers_costs_a_bounded_ring_and_a_bounded_goodbye(path):
    with Receiver(path, acknowledges=False) as receiver:
        uplink = Uplink(str(path), PROCESS, capacity=10)
        uplink.start()
        for _ in range(1000):
            sample(uplink)
        receiver.wait_for(lambda: 1000 in receiver.numbers())
        assert len(uplink._ring) == 10
        assert uplink.close(0.2) == 10
        assert threads() == set()


@contextmanager
def connection_of(uplink: Uplink, path: Path) -> Iterator[socket.socket]:
    """What an uplink that has something to send is connected to, and nobody answers on."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        uplink.start()
        sample(uplink)
        connection, _ = listener.accept()
        with connection:
            yield connection


def test_a_socket_that_accepts_and_says_nothing_holds_nobody_up(path, uplink):
    with connection_of(uplink, path):
        assert uplink.close(0.1) == 1
    assert threads() == set()


def test_garbage_on_the_socket_is_borne_until_a_daemon_is_there(path, uplink):
    with connection_of(uplink, path) as connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nnot gRPC" * 100)
    path.unlink()
    with Receiver(path) as receiver:
        receiver.wait_for(lambda: receiver.numbers() == [1])


def test_without_a_daemon_nothing_waits_and_nothing_is_printed(path, uplink, capfd):
    uplink.start()
    sample(uplink)
    assert uplink.close(0.1) == 1
    assert capfd.readouterr() == ("", "")


SHUT_OUT = """
import logging, os, sys
from allocscope.model import AllocatorRef, Process, Sample
from allocscope.probe.uplink import Uplink
logging.basicConfig(level=logging.INFO, format="%(message)s")
os.geteuid() or os.seteuid(65534)  # root may open everything
uplink = Uplink(sys.argv[1], Process(process_id="a1" * 16, job="train", pid=7, host="node", started_us=1))
uplink.start()
uplink.sample(AllocatorRef("a1" * 16, "GPU-1"), Sample(uplink.next_sequence(), 1, allocated_bytes=1))
print(uplink.close(0.5))  # it tries every tenth of a second
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_socket_that_the_job_may_not_open_is_told_once_and_whose_it_is(open_folder):
    path = open_folder / "d.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0)
        listener.listen()
        command = [sys.executable, "-c", SHUT_OUT, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    group = grp.getgrgid(path.stat().st_gid).gr_name
    assert done.stdout == "1\n"
    assert done.stderr == (
        f"allocscope: {path} is closed to this process: Permission denied; its mode is s---------,"
        f" its group {group} (the next ones of this kind are not logged)\n"
    )


def test_a_socket_nobody_listens_on_is_tried_again(path, uplink):
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    uplink.start()
    sample(uplink)
    path.unlink()
    with Receiver(path) as receiver:
        receiver.wait_for(lambda: receiver.numbers() == [1])


@pytest.mark.parametrize("name", ["a b.sock", "100%.sock", "ü.sock"])
def test_any_name_of_a_socket_will_do(tmp_path, name):
    uplink = Uplink(str(tmp_path / name), PROCESS)
    with Receiver(tmp_path / "d.sock") as receiver:
        (tmp_path / name).symlink_to(tmp_path / "d.sock")
        sample(uplink)
        uplink.start()
        assert uplink.close(LONG_S) == 0
    assert receiver.numbers() == [1]


@pytest.mark.parametrize("name", ["x" * 60, "\0", ""])
def test_a_socket_that_cannot_be_is_only_absent(tmp_path, path, name, capfd):
    folder = tmp_path / ("y" * 60)
    folder.mkdir()
    (folder / ("x" * 60)).touch()
    uplink = Uplink(str(folder / name) if name else "", PROCESS)
    uplink.start()
    sample(uplink)
    assert uplink.close(0.05) == 1
    assert capfd.readouterr() == ("", "")


def test_what_does_not_fit_is_counted_and_told(path):
    """Maps go first, then samples; the daemon learns how many were lost."""
    uplink = Uplink(str(path), PROCESS, capacity=4)
    for hand_on in (
        sample,
        block_map,
        event,
        block_map,
        sample,
        sample,
        sample,
    ):  # numbered 1 to 7; 2, 4 and 1 are lost
        hand_on(uplink)
    with Receiver(path) as receiver:
        uplink.start()
        receiver.wait_for(lambda: receiver.numbers() == [3, 5, 6, 7])
        wait_until_empty(uplink)
        sample(uplink)
        assert uplink.close(LONG_S) == 0
    assert receiver.numbers() == [3, 5, 6, 7, 8, 9]
    told = receiver.events()[-1]
    assert (told.sequence, told.kind, told.dropped_count) == (9, EventKind.DROPPED, 3)


def test_what_was_lost_is_told_at_the_end_too(path):
    uplink = Uplink(str(path), PROCESS, capacity=2)
    for _ in range(5):
        sample(uplink)
    with Receiver(path) as receiver:
        uplink.start()
        receiver.wait_for(receiver.numbers)
        wait_until_empty(uplink)
        assert uplink.close(LONG_S) == 0
    assert [(e.kind, e.dropped_count) for e in receiver.events()] == [(EventKind.DROPPED, 3)]


def test_maps_are_bounded_in_bytes(path, monkeypatch):
    monkeypatch.setattr(uplink_module, "HELD_MAP_BYTES", 300)
    uplink = Uplink(str(path), PROCESS)
    for _ in range(10):
        block_map(uplink)
    assert len(uplink._ring) == 4  # three maps of 87 bytes, and one word of the first loss
    with Receiver(path) as receiver:
        uplink.start()
        assert uplink.close(LONG_S) == 0
    assert [m.sequence for m in receiver.block_maps()] == [9, 10, 11]
    assert [(e.sequence, e.dropped_count) for e in receiver.events()] == [(5, 1), (12, 6)]


def test_a_map_too_large_for_a_message_is_left_out(path, uplink, monkeypatch):
    monkeypatch.setattr(uplink_module, "LARGEST_MAP_BYTES", 20)
    block_map(uplink)
    monkeypatch.undo()
    with Receiver(path) as receiver:
        uplink.start()
        sample(uplink)
        assert uplink.close(LONG_S) == 0
    assert (receiver.kinds(), [e.dropped_count for e in receiver.events()]) == (["hello", "samples", "event"], [1])


def test_a_figure_that_cannot_be_costs_only_its_own_sample(path, uplink):
    for figure in (5, -1, 7, 2**70):
        sample(uplink, allocated_bytes=figure)
    with Receiver(path) as receiver:
        uplink.start()
        assert uplink.close(LONG_S) == 0
    assert [s.allocated_bytes for s in receiver.samples()] == [5, 7]


def test_an_event_that_cannot_be_is_left_out(path, uplink):
    uplink.event(Event(PROCESS.process_id, uplink.next_sequence(), -5, EventKind.OOM))
    with Receiver(path) as receiver:
        uplink.start()
        assert uplink.close(LONG_S) == 0
    assert [e.dropped_count for e in receiver.events()] == [1]


def test_an_introduction_comes_before_what_follows_it(path, uplink):
    device = Device("GPU-2", 1)
    with Receiver(path) as receiver:
        uplink.start()
        sample(uplink)
        receiver.wait_for(lambda: receiver.numbers() == [1])
        uplink.introduce(Process(PROCESS.process_id, "train", 7, "node", 1, devices=(device,)))
        sample(uplink, OTHER_REF)
        assert uplink.close(LONG_S) == 0
    assert receiver.kinds() == ["hello", "samples", "hello", "samples"]
    assert [p.devices for p in receiver.hellos()] == [(), (device,)]


def test_orders_come_to_the_callback_and_its_failures_stay_there(path):
    orders = []
    came = threading.Event()

    def obey(order):
        orders.append(order)
        if len(orders) == 1:
            raise ValueError("of the callback's own")
        came.set()

    uplink = Uplink(str(path), PROCESS, on_order=obey)
    with Receiver(path) as receiver:
        receiver.say(orders=(Intervals(sample_us=5), CaptureOrder("0" * 32)))
        uplink.start()
        assert came.wait(LONG_S)
        sample(uplink)
        assert uplink.close(LONG_S) == 0
    assert orders == [Intervals(sample_us=5), CaptureOrder("0" * 32)]
    assert len(receiver.streams) == 1


def test_each_kind_of_refusal_is_logged_once(path, uplink, caplog):
    with Receiver(path) as receiver:
        receiver.say(refused=("rank 9 of 8", "rank 12 of 8", "device 'GPU-1' unknown", "device 'GPU-2' unknown"))
        uplink.start()
        sample(uplink)
        assert uplink.close(LONG_S) == 0
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(" (the next")[0] for text in texts] == [
        "allocscope: the daemon refused: rank 9 of 8",
        "allocscope: the daemon refused: device 'GPU-1' unknown",
    ]


@pytest.mark.parametrize("hands_on", ["samples", "events"])
def test_a_job_without_a_protobuf_that_will_do_goes_on_and_it_is_said_once(path, uplink, monkeypatch, caplog, hands_on):
    def fail():
        raise TypeError("Descriptors cannot be created directly.")

    monkeypatch.setattr(messages, "import_wire", fail)
    caplog.set_level(logging.INFO, "allocscope.probe")
    with Receiver(path) as receiver:
        uplink.start()
        for hand_on in (sample, sample) if hands_on == "samples" else (event, block_map, event):
            hand_on(uplink)
        with uplink._changed:
            assert uplink._changed.wait_for(lambda: uplink._inert, LONG_S)
        sample(uplink)
        assert (uplink.close(LONG_S), len(uplink._ring), receiver.requests()) == (0, 0, [])
    assert [r.getMessage() for r in caplog.records] == [
        (
            "allocscope: sends nothing: cannot use protobuf (Descriptors cannot be created directly.);"
            " it needs protobuf 5.29 or later in the job's Python"
        )
    ]


def test_protobuf_is_not_imported_while_there_is_no_daemon(path, uplink, monkeypatch):
    imports: list = []
    monkeypatch.setattr(messages, "import_wire", lambda: imports.append(1))
    uplink.start()
    sample(uplink)
    assert (uplink.close(0.3), imports) == (1, [])


def test_a_large_backlog_goes_through_a_small_window(path, uplink):
    """Many times what HTTP/2 lets go without an answer, in both directions."""
    groups = (GROUP,) * 500
    for _ in range(20):
        uplink.block_map(REF, BlockMap(uplink.next_sequence(), 5, groups))
    with Receiver(path) as receiver:
        receiver.say(refused=tuple(f"{n:0500d}" for n in range(1000)))
        uplink.start()
        assert uplink.close(LONG_S) == 0
    assert [m.sequence for m in receiver.block_maps()] == list(range(1, 21))
    assert receiver.block_maps()[-1].groups == groups


def test_handing_on_from_many_threads_loses_nothing(path, uplink):
    with Receiver(path) as receiver:
        uplink.start()
        numbering = threading.Lock()

        def pump():
            for _ in range(200):
                with numbering:
                    sample(uplink)

        pumps = [threading.Thread(target=pump) for _ in range(4)]
        for each in pumps:
            each.start()
        for each in pumps:
            each.join()
        assert uplink.close(LONG_S) == 0
    assert receiver.numbers() == list(range(1, 801))


def test_in_a_forked_child_it_does_nothing(path, uplink):
    """The child holds the parent's lock, as if another thread had held it at the fork; it must not wait for it."""
    read, write = os.pipe()
    with uplink._changed:
        child = os.fork()
        if child == 0:
            sample(uplink)
            block_map(uplink)
            uplink.introduce(PROCESS)
            uplink.start()
            os.write(write, bytes([uplink.close(5), uplink.next_sequence()]))
            os._exit(0)
    os.close(write)
    assert os.read(read, 2) == b"\0\0"
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert len(uplink._ring) == 0
