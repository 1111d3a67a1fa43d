"""The daemon as a real process, between a probe and a collector that a test plays."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from allocscope.model import Event, EventKind, Intervals
from allocscope.model.wire import order_to_wire, process_to_wire
from allocscope.proto.v1.collector_service_pb2 import IngestResponse, ProcessOrder, Rejection
from tests.daemon.fakes import GIB, WAIT_S, DaemonProcess, FakeCollector, FakeProbe, process, sample
from tests.daemon.stranger import Stranger
from tests.e2e.processes import until
from tests.needs import promtool


@pytest.fixture
def collector():
    fake = FakeCollector()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One daemon, that every lie is told to, and its collector."""
    fake = FakeCollector()
    with DaemonProcess(tmp_path_factory.mktemp("shared"), fake.address) as daemon:
        yield daemon, fake
    fake.stop()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is to fail at its start."""
    command = [sys.executable, "-m", "allocscope.cli", "daemon", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


# the way of the data


def test_what_a_job_says_reaches_the_collector_with_the_job_and_the_bill(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1), sample(2))
        probe.event(Event("a" * 32, 3, 1, EventKind.OOM, "GPU-1", message="CUDA out of memory"))
        probe.wait_acknowledged(3)
        collector.wait_for(lambda c: any(batch.events for batch in c.batches))
        collector.wait_for(lambda c: any(len(r.bill) > 3 for batch in c.batches for r in batch.devices))
        with_events = next(batch for batch in collector.batches if batch.events)
        assert list(with_events.processes) == [process_to_wire(process())]
        assert with_events.events[0].message == "CUDA out of memory"
        assert collector.sequences() == [1, 2]
        reading = next(r for batch in collector.batches for r in batch.devices if len(r.bill) > 3)
        assert sum(line.bytes for line in reading.bill) == 80 * GIB
        assert [hello.node for hello in collector.hellos] == ["node-1"]
        assert collector.hellos[0].metrics_address == daemon.metrics
        assert [batch.sequence for batch in collector.batches] == list(range(1, len(collector.batches) + 1))
        probe.end()
        assert daemon.stop() == 0


def test_samples_of_one_interval_travel_as_columns(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address, interval_s=1) as daemon:
        probe = FakeProbe(daemon.socket, process())
        for sequence in range(1, 51):
            probe.samples(sample(sequence))
        probe.wait_acknowledged(50)
        collector.wait_for(lambda c: len(c.sequences()) == 50)
        assert collector.sequences() == list(range(1, 51))
        assert sum(len(batch.samples) for batch in collector.batches) <= 3
        probe.end()


def test_orders_of_the_collector_reach_the_process(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        order = order_to_wire(Intervals(sample_us=250_000))
        probe.samples(sample(1))
        collector.wait_for(lambda c: c.sequences() == [1])
        collector.order(ProcessOrder(process_id="f" * 32, order=order))
        collector.order(ProcessOrder(process_id="a" * 32, order=order))
        probe.wait_for(lambda p: bool(p.orders))
        assert probe.orders == [order]
        probe.end()


def test_what_a_probe_sends_again_is_taken_once(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        first = FakeProbe(daemon.socket, process())
        first.samples(sample(1), sample(2), sample(3))
        first.wait_acknowledged(3)
        first.break_off()
        again = FakeProbe(daemon.socket, process())
        again.samples(sample(2), sample(3), sample(4))
        again.wait_acknowledged(4)
        collector.wait_for(lambda c: 4 in c.sequences())
        assert collector.sequences() == [1, 2, 3, 4]
        assert daemon.figures("allocscope_samples_ingested_total") == {"allocscope_samples_ingested_total": 4}
        again.end()


def test_a_process_that_ends_need_not_wait_for_the_interval(tmp_path):
    with DaemonProcess(tmp_path, interval_s=10) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        probe.end()
        assert probe.acknowledged == 1


def test_a_proxy_for_the_way_out_of_the_site_is_not_the_way_to_the_collector(tmp_path, collector, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        collector.wait_for(lambda c: c.sequences() == [1])
        probe.end()


# what is lost, and what is not


def test_nothing_acknowledged_is_lost_by_kill_9_and_numbers_go_on(tmp_path, collector):
    with DaemonProcess(tmp_path) as daemon:  # no collector
        probe = FakeProbe(daemon.socket, process())
        probe.samples(*(sample(sequence) for sequence in range(1, 101)))
        probe.wait_acknowledged(100)
        daemon.kill()
        probe.wait_for(lambda p: p.over)
        probe.break_off()
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(101))
        probe.wait_acknowledged(101)
        collector.wait_for(lambda c: 101 in c.sequences())
        assert collector.sequences() == list(range(1, 102))
        numbers = [batch.sequence for batch in collector.batches]
        assert numbers == sorted(set(numbers))
        probe.end()
        assert daemon.stop() == 0
    assert len({hello.daemon_id for hello in collector.hellos}) == 1


def test_a_collector_that_went_away_gets_what_it_had_not_acknowledged(tmp_path):
    first = FakeCollector()
    with DaemonProcess(tmp_path, first.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        first.wait_for(lambda c: c.sequences() == [1])
        with first.changed:
            first.acknowledges = False
        acknowledged = first.stored
        probe.samples(sample(2))
        first.wait_for(lambda c: c.sequences() == [1, 2])
        first.stop()
        probe.samples(sample(3))
        probe.wait_acknowledged(3)
        second = FakeCollector(first.address)
        second.stored = acknowledged
        try:
            second.wait_for(lambda c: 3 in c.sequences())
            assert second.sequences() == [2, 3]
            assert second.batches[0].sequence == acknowledged + 1
        finally:
            second.stop()
        probe.end()


def test_a_collector_that_knows_more_than_the_spool_moves_its_numbers_on(tmp_path, collector):
    """Numbers that it has seen it would pass over: the folder may have been put back from a copy."""
    collector.stored = 500
    with DaemonProcess(tmp_path, collector.address) as daemon:
        daemon.wait_log("collector connected")
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        collector.wait_for(lambda c: c.sequences() == [1])
        assert all(batch.sequence > 500 for batch in collector.batches)
        probe.end()


def test_a_collector_that_does_not_acknowledge_gets_a_few_batches_and_no_more(tmp_path, collector):
    collector.acknowledges = False
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        for sequence in range(1, 31):
            probe.samples(sample(sequence))
            probe.wait_acknowledged(sequence)  # a batch each
        collector.wait_for(lambda c: len(c.batches) >= 16)
        assert len(collector.batches) == 16
        probe.end()


def test_a_full_spool_drops_its_oldest_batches_and_counts_what_was_in_them(tmp_path):
    with DaemonProcess(tmp_path, spool_limit_bytes=1 << 20) as daemon:
        probe = FakeProbe(daemon.socket, process())
        for start in range(1, 24001, 2000):
            probe.samples(*(sample(sequence) for sequence in range(start, start + 2000)))
            probe.wait_acknowledged(start + 1999)
        figures = daemon.figures("allocscope_")
        assert figures["allocscope_spool_bytes"] <= 1 << 20
        dropped = figures['allocscope_dropped_total{reason="spool_full",what="samples"}']
        assert 0 < dropped < 24000
        assert figures['allocscope_dropped_total{reason="spool_full",what="batches"}'] > 0
        assert figures["allocscope_samples_ingested_total"] == 24000
        probe.end()


def test_a_disk_that_cannot_be_written_for_a_while_loses_nothing(tmp_path):
    with DaemonProcess(tmp_path) as daemon:  # no collector
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        probe.wait_acknowledged(1)
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        probe.samples(sample(2))
        daemon.wait_log("the spool cannot be written; kept in memory, tried again")
        assert probe.acknowledged == 1
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        probe.wait_acknowledged(2)
        daemon.wait_log("the spool can be written again")
        assert daemon.figures("allocscope_spool_write_failures_total")["allocscope_spool_write_failures_total"] > 0
        probe.end()


def test_a_disk_that_cannot_be_written_does_not_hold_up_what_can_be_sent(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        probe.wait_acknowledged(1)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        for sequence in range(2, 6):
            probe.samples(sample(sequence))
            probe.wait_acknowledged(sequence)  # the collector has it
        assert collector.sequences() == [1, 2, 3, 4, 5]
        assert daemon.figures("allocscope_dropped_total") == {}
        probe.end()


def test_at_the_end_the_socket_goes_and_what_came_last_is_kept(tmp_path):
    with DaemonProcess(tmp_path, interval_s=10, drain_s=0.1) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        daemon.wait_log("process attached")
        assert daemon.stop() == 0
        probe.wait_acknowledged(1)
        assert not daemon.socket.exists()
        assert daemon.wait_log("stopped")["waiting"] >= 1
        probe.break_off()


def test_what_the_collector_rejects_is_counted(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        collector.to_say.put(
            IngestResponse(rejections=[Rejection(sequence=1, reason="out_of_range", message="!", count=3)])
        )
        daemon.wait_log("collector rejected")
        assert daemon.figures("allocscope_dropped_total") == {
            'allocscope_dropped_total{reason="out_of_range",what="rejected"}': 3
        }


def test_a_second_daemon_of_one_name_is_told_and_does_not_hammer(tmp_path, collector):
    collector.refusal = (grpc.StatusCode.ALREADY_EXISTS, "node node-1 is another daemon's")
    with DaemonProcess(tmp_path, collector.address) as daemon:
        line = daemon.wait_log("nothing goes to the collector", "ALREADY_EXISTS: node node-1 is another daemon's")
        assert line["level"] == "error"
        probe = FakeProbe(daemon.socket, process())
        for sequence in range(1, 6):
            probe.samples(sample(sequence))
            probe.wait_acknowledged(sequence)
        assert len(collector.hellos) == 1
        probe.end()


def test_what_a_probe_lost_itself_is_counted(shared):
    daemon, _ = shared
    process_id = uuid.uuid4().hex
    probe = FakeProbe(daemon.socket, process(process_id=process_id))
    probe.event(Event(process_id, 1, 1, EventKind.DROPPED, dropped_count=5))
    probe.wait_acknowledged(1)
    assert daemon.figures("allocscope_dropped_total") == {'allocscope_dropped_total{reason="probe",what="messages"}': 5}
    probe.end()


# what is refused


@pytest.mark.parametrize(
    ("lie", "reason", "text"),
    [
        pytest.param(
            lambda p: p.samples(sample(2, reserved_bytes=81 * GIB)),
            "out_of_range",
            "reserved_bytes is 86973087744, the device has 85899345920 bytes",
            id="more than the device has",
        ),
        pytest.param(
            lambda p: p.samples(sample(2), process_id="b" * 32),
            "foreign_process",
            f"process ME sent figures of process '{'b' * 32}'",
            id="another process",
        ),
        pytest.param(
            lambda p: p.samples(sample(2), device="GPU-9"),
            "unknown_device",
            "device 'GPU-9' is in no hello of process ME",
            id="a device that nobody told of",
        ),
        pytest.param(
            lambda p: p.samples(*(sample(sequence) for sequence in range(2, 8195))),
            "too_many_samples",
            "8193 samples in one chunk (at most 8192)",
            id="a huge chunk",
        ),
        pytest.param(
            lambda p: p.send(),
            "unknown_message",
            "a message that this daemon does not know; is it older than the probe?",
            id="an empty message",
        ),
    ],
)
def test_a_lie_is_refused_with_its_reason_and_the_stream_lives_on(shared, lie, reason, text):
    daemon, collector = shared
    process_id = uuid.uuid4().hex
    name = f'allocscope_samples_rejected_total{{reason="{reason}"}}'
    before = daemon.figures(name).get(name, 0)
    probe = FakeProbe(daemon.socket, process(process_id=process_id))
    probe.samples(sample(1))
    lie(probe)
    probe.wait_for(lambda p: bool(p.refused))
    probe.samples(sample(9000))
    probe.wait_acknowledged(9000)
    assert probe.refused == [text.replace("ME", process_id)]
    collector.wait_for(lambda c: 9000 in c.sequences(process_id))
    assert collector.sequences(process_id) == [1, 9000]
    assert daemon.figures(name)[name] > before
    probe.end()


@pytest.mark.parametrize(
    ("hello", "refused"),
    [
        (process(rank=2), ["job 'train': rank 2 of a world of 2 (ranks count from 0)"]),
        (process(job="a\nb"), ["a job with unprintable letters: 'a\\nb'"]),
        (None, []),
    ],
)
def test_who_does_not_say_who_it_is_is_refused_and_others_are_not_disturbed(shared, hello, refused):
    daemon, collector = shared
    process_id = uuid.uuid4().hex
    good, bad = FakeProbe(daemon.socket, process(process_id=process_id)), FakeProbe(daemon.socket, hello)
    bad.samples(sample(1), process_id="a" * 32)
    bad.wait_acknowledged(1)
    assert bad.refused == [*refused, "figures of a process that has not said who it is, or was refused"]
    good.samples(sample(1))
    good.wait_acknowledged(1)
    collector.wait_for(lambda c: c.sequences(process_id) == [1])
    assert collector.sequences("a" * 32) == []
    bad.end()
    good.end()


def test_a_process_cannot_take_anothers_id(shared):
    daemon, _ = shared
    process_id = uuid.uuid4().hex
    owner = FakeProbe(daemon.socket, process(process_id=process_id))
    owner.samples(sample(1))
    owner.wait_acknowledged(1)
    with Stranger(daemon.socket, process_id, pid=os.getpid()) as thief:
        assert thief.answer()["refused"] == [
            f"a hello of pid {os.getpid()} on a connection of pid {thief.pid}'s",
            "figures of a process that has not said who it is, or was refused",
        ]
    with Stranger(daemon.socket, process_id) as thief:
        assert thief.answer()["refused"] == [
            f"process id {process_id} is that of pid {os.getpid()}, not of pid {thief.pid}",
            "figures of a process that has not said who it is, or was refused",
        ]
    owner.samples(sample(2))
    owner.wait_acknowledged(2)
    owner.end()


GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(range(256)) * 16,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
)


def test_garbage_on_the_socket_disturbs_nobody(shared):
    daemon, _ = shared
    probe = FakeProbe(daemon.socket, process(process_id=uuid.uuid4().hex))
    for garbage in GARBAGE:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(WAIT_S)
            raw.connect(os.fspath(daemon.socket))
            raw.sendall(garbage)
    assert raw_attach(daemon, b"\xff\xff\xff not a message") is grpc.StatusCode.INVALID_ARGUMENT
    assert raw_attach(daemon, b"\x7a" + b"x" * (3 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    probe.samples(sample(1))
    probe.wait_acknowledged(1)
    assert daemon.process.poll() is None
    probe.end()


def raw_attach(daemon: DaemonProcess, message: bytes) -> grpc.StatusCode | None:
    """How a stream ends that brings these bytes as its message."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        attach: Any = channel.stream_stream("/allocscope.proto.v1.ProbeService/Attach")
        try:
            list(attach(iter([message]), timeout=WAIT_S))
        except grpc.RpcError as error:
            return error.code()
    return None


# what becomes of its socket and its descriptors


def test_jobs_find_the_daemon_again_after_somebody_took_its_socket_away(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address, socket=tmp_path / "run" / "daemon.sock") as daemon:
        early = FakeProbe(daemon.socket, process())
        early.samples(sample(1))
        early.wait_acknowledged(1)
        shutil.rmtree(tmp_path / "run")
        daemon.wait_log("somebody took the jobs' socket away; it is made anew")
        late = FakeProbe(daemon.socket, process("b"))
        late.samples(sample(1))
        late.wait_acknowledged(1)
        early.samples(sample(2))
        early.wait_acknowledged(2)
        early.end()
        late.end()
        assert daemon.stop() == 0
        assert not daemon.socket.exists()


def test_where_descriptors_are_few_jobs_are_turned_away_and_the_daemon_lives_on(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address, most_descriptors=96) as daemon:
        told = daemon.wait_log("few descriptors, so few jobs are let in: raise the hard limit (ulimit -Hn)")
        assert (told["limit"], told["connections"]) == (96, 16)
        with ExitStack() as jobs:
            all_at_once = [jobs.enter_context(connected(daemon)) for _ in range(40)]
            assert sum(map(is_let_in, all_at_once)) == 16
            assert "allocscope_processes 0.0" in daemon.scrape()
        until(lambda: is_let_in_now(daemon), "there is room again")


def connected(daemon: DaemonProcess) -> socket.socket:
    job = socket.socket(socket.AF_UNIX)
    job.connect(os.fspath(daemon.socket))  # without a time limit it waits for room (unix(7), EAGAIN)
    job.settimeout(WAIT_S)
    return job


def is_let_in(job: socket.socket) -> bool:
    """Whoever is gets HTTP/2's first words, whoever is not is hung up on."""
    try:
        return bool(job.recv(1))
    except ConnectionResetError:
        return False


def is_let_in_now(daemon: DaemonProcess) -> bool:
    with connected(daemon) as job:
        return is_let_in(job)


# how it ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_in_order_by_each_signal_that_asks_for_it(tmp_path, number):
    with DaemonProcess(tmp_path, drain_s=0.1) as daemon:
        daemon.process.send_signal(number)
        assert daemon.wait() == 0
        assert daemon.wait_log("stopped")["level"] == "info"
        assert not daemon.socket.exists()


# what it shows


def test_metrics_tell_the_bill_of_a_device_and_go_when_the_job_goes(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        collector.wait_for(lambda c: any(len(r.bill) > 3 for batch in c.batches for r in batch.devices))
        job = 'gpu="0",job="train",line="{}",node="node-1",rank="0",uuid="GPU-1"'
        device = 'gpu="0",job="",line="{}",node="node-1",rank="",uuid="GPU-1"'
        expected = {
            job.format("requested"): 15 * GIB,
            job.format("rounding"): 0,
            job.format("awaiting_free"): 0,
            job.format("stranded"): 2 * GIB,
            job.format("releasable"): 3 * GIB,
            job.format("private"): 0,
            job.format("outside"): 1 * GIB,
            device.format("other_processes"): 9 * GIB,
            device.format("free"): 50 * GIB,
        }
        assert daemon.figures("allocscope_bill_bytes") == {
            f"allocscope_bill_bytes{{{labels}}}": figure for labels, figure in expected.items()
        }
        labels = 'gpu="0",job="train",node="node-1",rank="0",uuid="GPU-1"'
        figures = daemon.figures("allocscope_")
        assert figures[f"allocscope_reserved_bytes{{{labels}}}"] == 20 * GIB
        assert figures[f"allocscope_alloc_retries_total{{{labels}}}"] == 3
        assert figures[f"allocscope_ooms_total{{{labels}}}"] == 1
        assert (
            figures['allocscope_device_memory_total_bytes{gpu="0",model="NVIDIA H200",node="node-1",uuid="GPU-1"}']
            == 80 * GIB
        )
        probe.event(Event("a" * 32, 2, 1, EventKind.STOPPED))
        probe.end()
        daemon.wait_log("process gone")
        other = FakeProbe(daemon.socket, process("b", devices=()))
        other.event(Event("b" * 32, 1, 1, EventKind.STOPPED))
        other.wait_acknowledged(1)  # so a whole round has passed
        other.end()
        assert daemon.figures("allocscope_bill_bytes") == {}


def test_a_process_that_was_killed_goes_at_once_where_this_node_can_see_it(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon, Stranger(daemon.socket, "a" * 32) as job:
        daemon.wait_log("process attached")
        job.kill()
        assert daemon.wait_log("process gone")["job"] == "train"


def test_promtool_finds_nothing_wrong_with_metrics(tmp_path, collector):
    tool = promtool()
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probes = [
            FakeProbe(daemon.socket, process(letter, rank=None)) for letter in "ab"
        ]  # two of one job, ranks unknown
        for probe in probes:
            probe.samples(sample(1))
            probe.wait_acknowledged(1)
        probes[0].samples(sample(2, reserved_bytes=81 * GIB))
        probes[0].wait_for(lambda p: bool(p.refused))
        collector.wait_for(lambda c: any(len(r.processes) == 2 for batch in c.batches for r in batch.devices))
        text = daemon.scrape()
        checked = subprocess.run(
            [tool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
        assert 'allocscope_reserved_bytes{gpu="0",job="train",node="node-1",rank="",uuid="GPU-1"} ' in text
        for probe in probes:
            probe.end()


# what keeps it from starting


def test_a_port_in_use_is_a_clear_error_before_anything_else_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--metrics-listen", address, "--spool", f"{tmp_path}/spool", "--socket", f"{tmp_path}/s")
    assert done.stderr == (
        f"allocscope daemon: cannot serve /metrics on {address}: Address already in use (--metrics-listen names another)\n"
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])


def test_another_daemon_on_the_socket_is_a_clear_error_and_one_that_died_is_replaced(tmp_path):
    with DaemonProcess(tmp_path) as daemon:
        done = run("--metrics-listen", "127.0.0.1:0", "--spool", f"{tmp_path}/spool-2", "--socket", str(daemon.socket))
        assert done.stderr == (
            f"allocscope daemon: cannot listen for jobs on {daemon.socket}: another daemon listens there"
            " (--socket names another)\n"
        )
        assert done.returncode == 1
        daemon.kill()
    assert (tmp_path / "daemon.sock").exists()
    with DaemonProcess(tmp_path) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        probe.wait_acknowledged(1)
        assert daemon.socket.stat().st_mode & 0o777 == 0o660
        probe.end()


def test_the_socket_may_be_given_to_a_group_and_opened_further(tmp_path):
    own = os.getgroups()[0] if os.geteuid() else 7  # nobody but root may give away what is theirs
    with DaemonProcess(tmp_path, socket_group=own, socket_mode="0666") as daemon:
        found = daemon.socket.stat()
        assert (found.st_gid, found.st_mode & 0o777) == (own, 0o666)


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        (
            "--spool",
            "{}/file/spool",
            "cannot keep the spool in {}/file/spool: Not a directory (--spool names another folder)",
        ),
        ("--socket", "{}/file/s", "cannot listen for jobs on {}/file/s: {}/file is no folder (--socket names another)"),
        (
            "--socket-group",
            "no-such-group",
            "cannot give the jobs' socket to the group no-such-group: there is no such group (--socket-group names another)",
        ),
        (
            "--proc",
            "{}/node/proc",
            "cannot see processes in {}/node/proc: there is no {}/node/proc/stat (--proc names another, /proc as a rule)",
        ),
        (
            "--collector-server-name",
            "collector.example",
            "collector_server_name goes over TLS only: set collector_ca, or collector_tls where its certificate is of a public CA",
        ),
        (
            "--addresses-file",
            "{}/file/a",
            "cannot write the addresses to {}/file/a: Not a directory (--addresses-file names another)",
        ),
        (
            "--socket",
            "{}/file",
            "cannot listen for jobs on {}/file: there is a file of that name, which is no socket (--socket names another)",
        ),
        (
            "--socket",
            "{}/" + "x" * 108,
            "cannot listen for jobs on {}/" + "x" * 108 + ": the path is longer than 107 bytes, the system's limit"
            " (--socket names another)",
        ),
    ],
)
def test_what_cannot_be_had_is_a_clear_error(tmp_path, flag, value, text):
    (tmp_path / "file").write_text("")
    given = {"--spool": f"{tmp_path}/spool", "--socket": f"{tmp_path}/s", "--metrics-listen": "127.0.0.1:0"}
    given[flag] = value.replace("{}", str(tmp_path))
    done = run(*(part for item in given.items() for part in item))
    told = [line for line in done.stderr.splitlines() if "[info" not in line and "[warning" not in line]
    assert (done.returncode, told) == (1, [f"allocscope daemon: {text.replace('{}', str(tmp_path))}"])


def test_every_problem_with_the_settings_is_told_at_once(tmp_path):
    config = tmp_path / "daemon.toml"
    config.write_text('intervall_s = 1\nspool_limit_bytes = "1G"\nmetrics_listen = "9466"\nsocket_mode = "rw"\n')
    done = run("--config", str(config), "--nvml-timeout-s", "soon", "--node", "a\nb")
    assert done.stderr == (
        f"allocscope daemon: 6 problem(s) with the settings; the file is {config}\n"
        "  intervall_s is not a setting, but is in the file (did you mean 'interval_s'?)\n"
        "  --node is 'a\\nb': must have 1 to 253 printable letters\n"
        "  socket_mode is 'rw': must be octal, from 0000 to 0777, such as 0660\n"
        "  spool_limit_bytes is '1G': must be a whole number\n"
        "  metrics_listen is '9466': must be HOST:PORT, with a PORT from 0 to 65535 and an IPv6 HOST in brackets\n"
        "  --nvml-timeout-s is 'soon': must be a number\n"
    )
    assert done.returncode == 2
