"""Bad input gets a clear answer, and the rest goes on: from outside, on real processes."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from allocscope.model import Process, SampleChunk, wire
from allocscope.model.identity import AllocatorRef, Device
from allocscope.proto.v1.probe_service_pb2 import AttachRequest
from allocscope.proto.v1.probe_service_pb2_grpc import ProbeServiceStub
from tests.e2e.accounts import Account, handed_on, is_whole, stored
from tests.e2e.processes import RECORDINGS, Job, Machine, Service, recording

pytestmark = pytest.mark.end_to_end

RUN = "varlen-1-2985"
LONG_AGO_US = 1_700_000_000_000_000


@dataclass
class Fleet:
    """One collector, one daemon."""

    machine: Machine
    collector: Service
    daemon: Service

    def play(self, *, job: str, clock_off_s: float = 0) -> Job:
        """Some seconds long."""
        return self.machine.play(recording("kv_serve-1-4114"), self.daemon, job=job, speed=150, clock_off_s=clock_off_s)

    def assert_whole(self, job: Job) -> dict[str, object]:
        """Everything that the job handed on is stored; what the job said."""
        summary = job.end()
        expected, database = handed_on(job, summary), self.machine.database
        self.machine.until(lambda: is_whole(database, job, summary, expected), f"all of {job.uuid} is stored")
        assert stored(database, job, summary) == expected
        return summary


@pytest.fixture
def fleet(machine: Machine) -> Fleet:
    collector = machine.collector()
    return Fleet(machine, collector, machine.daemon("n1", collector))


# among those that run


def test_a_second_daemon_under_one_node_name_is_told_so_and_the_first_goes_on(fleet: Fleet) -> None:
    fleet.machine.until(lambda: fleet.collector.said("stream opened", "n1"), "the first daemon is connected")
    job = fleet.play(job="first")
    second = fleet.machine.daemon("n1", fleet.collector, name="second")
    told = fleet.machine.until(lambda: second.said("ALREADY_EXISTS"), "the second daemon says what is wrong")
    assert "node 'n1'" in told
    assert "name" in told
    fleet.assert_whole(job)
    assert second.runs


def test_garbage_on_every_socket_loses_nothing(fleet: Fleet) -> None:
    job = fleet.play(job="among-garbage")
    noise = random.Random(8).randbytes(100_000)
    for place in _places(fleet):
        for garbage in (noise, b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise, b"GET / HTTP/1.1\r\n\r\n"):
            _throw(place, garbage)
    for target, method in (
        (f"unix:{fleet.daemon.addresses['socket']}", "/allocscope.proto.v1.ProbeService/Attach"),
        (fleet.collector.addresses["grpc"], "/allocscope.proto.v1.CollectorService/Ingest"),
    ):
        for garbage in (noise, b"\xff" * 30):
            assert _call(target, method, garbage) not in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED)
    fleet.assert_whole(job)
    assert fleet.collector.runs
    assert fleet.daemon.runs
    assert fleet.collector.get("/readyz") == {"status": "ok"}


Place = tuple[int, str | tuple[str, int]]
"""A family and an address in it."""


def _places(fleet: Fleet) -> list[Place]:
    def port(address: str) -> Place:
        host, _, number = address.rpartition(":")
        return socket.AF_INET, (host, int(number))

    addresses = {**fleet.collector.addresses, **fleet.daemon.addresses}
    return [(socket.AF_UNIX, addresses["socket"]), *(port(addresses[key]) for key in ("grpc", "http", "metrics"))]


def _throw(place: Place, garbage: bytes) -> None:
    family, address = place
    with closing(socket.socket(family, socket.SOCK_STREAM)) as thrower:
        thrower.settimeout(5)
        thrower.connect(address)
        with suppress(OSError):  # it may have hung up already
            thrower.sendall(garbage)


def _call(target: str, method: str, garbage: bytes) -> grpc.StatusCode:
    """How a stream ends on which this is sent as a message."""
    with grpc.insecure_channel(target) as channel:
        call: Any = channel.stream_stream(method, None, None)
        responses = call(iter([garbage]), timeout=20)
        with suppress(grpc.RpcError):
            list(responses)
        code: grpc.StatusCode = responses.code()
        return code


TOTAL = 8 << 30
DEVICE = Device("GPU-liar", 0, total_bytes=TOTAL)
LIAR = Process("a" * 32, "liar", pid=os.getpid(), host="elsewhere", started_us=LONG_AGO_US, devices=(DEVICE,))


def _of_the_liar(sequence: int, **counters: int) -> SampleChunk:
    sample = {"allocated_bytes": 1 << 20, "reserved_bytes": 2 << 20, "device_total_bytes": TOTAL, **counters}
    columns = {name: (figure,) for name, figure in sample.items()}
    return SampleChunk(AllocatorRef(LIAR.process_id, DEVICE.uuid), (sequence,), (time.time_ns() // 1000,), columns)


LIES = [
    pytest.param(replace(LIAR, rank=8, world_size=4), _of_the_liar(1), "rank 8 of a world of 4", id="rank"),
    pytest.param(
        LIAR,
        replace(_of_the_liar(1), allocator=AllocatorRef(LIAR.process_id, "GPU-of-somebody-else")),
        "'GPU-of-somebody-else'",
        id="device",
    ),
    pytest.param(
        LIAR, _of_the_liar(1, allocated_bytes=TOTAL * 2, reserved_bytes=TOTAL * 2), str(TOTAL * 2), id="counter"
    ),
    pytest.param(LIAR, _of_the_liar(1, allocated_bytes=1 << 30), "of 2097152 reserved bytes", id="sum"),
    pytest.param(
        LIAR,
        replace(_of_the_liar(1), allocator=AllocatorRef("b" * 32, DEVICE.uuid)),
        "b" * 32,
        id="process",
    ),
]


@pytest.fixture(scope="module")
def among_liars() -> Iterator[Fleet]:
    """One fleet for all of them: after each lie it still takes the truth."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        machine = Machine(Path(folder))
        try:
            collector = machine.collector()
            yield Fleet(machine, collector, machine.daemon("n1", collector))
        finally:
            machine.close()


@pytest.mark.parametrize(("hello", "lie", "named"), LIES)
def test_a_job_that_lies_is_told_so_and_what_is_true_is_stored(
    among_liars: Fleet, hello: Process, lie: SampleChunk, named: str
) -> None:
    honest_id = random.Random(named).randbytes(16).hex()
    honest = replace(LIAR, process_id=honest_id, job="honest", started_us=LONG_AGO_US + 1)
    truth = replace(_of_the_liar(1), allocator=AllocatorRef(honest_id, DEVICE.uuid))

    refused = _attach(among_liars.daemon, hello, lie)
    assert any(named in text for text in refused), refused
    assert _attach(among_liars.daemon, honest, truth) == []

    (sample,) = truth.samples()
    job = Job(Path(), DEVICE.uuid, among_liars.daemon.process)
    database, summary = among_liars.machine.database, {"process_id": honest_id}
    truth_stored = Account([sample], [], [])
    among_liars.machine.until(lambda: is_whole(database, job, summary, truth_stored), "the truth is stored")
    assert stored(database, job, summary) == truth_stored
    assert stored(among_liars.machine.database, job, {"process_id": LIAR.process_id}).samples == []
    assert among_liars.daemon.runs


def _attach(daemon: Service, hello: Process, chunk: SampleChunk) -> list[str]:
    """Say these two things; what the daemon refuses of them."""
    requests = [
        AttachRequest(hello=wire.process_to_wire(hello)),
        AttachRequest(samples=wire.chunk_to_wire(chunk)),
    ]
    with grpc.insecure_channel(f"unix:{daemon.addresses['socket']}") as channel:
        responses = ProbeServiceStub(channel).Attach(iter(requests), timeout=30)
        return [text for response in responses for text in response.refused]


def test_clocks_that_are_minutes_off_cost_nothing_and_are_told_of(machine: Machine) -> None:
    collector = machine.collector()
    late = Fleet(machine, collector, machine.daemon("late", collector, clock_off_s=-300))
    ahead = late.play(job="ahead", clock_off_s=420)
    behind = late.play(job="behind", clock_off_s=-7200)
    now_us = time.time_ns() // 1000
    summary = late.assert_whole(ahead)
    assert int(str(summary["start_us"])) > now_us + 300e6
    late.assert_whole(behind)
    (node,) = collector.get("/api/v1/nodes")["items"]
    assert node["clock_offset_s"] == pytest.approx(-300, abs=30)
    assert {job["job"]: job["live"] for job in collector.get("/api/v1/jobs")["items"]}.keys() == {"ahead", "behind"}


# what cannot even start


@dataclass(frozen=True)
class Refused:
    """How a command is refused: its exit status, and words that it must say, on standard error."""

    status: int
    words: tuple[str, ...]

    def assert_said_by(self, machine: Machine, *command: str) -> None:
        done = machine.run(*command)
        assert done.returncode == self.status, done.stderr
        for word in self.words:
            assert word in done.stderr
        assert "Traceback" not in done.stderr


def test_a_recording_that_is_cut_off_is_refused_by_name(machine: Machine) -> None:
    (machine.folder / f"{RUN}.run.json").write_text(recording(RUN).read_text())
    whole = (RECORDINGS / f"{RUN}.pickle.gz").read_bytes()
    snapshot = machine.folder / f"{RUN}.pickle.gz"
    snapshot.write_bytes(whole[: len(whole) // 2])
    refused = Refused(2, ("allocscope play: ", str(snapshot), "cut off"))
    refused.assert_said_by(machine, "play", str(machine.folder / f"{RUN}.run.json"))
    snapshot.write_bytes(gzip.compress(gzip.decompress(whole)[:-1000]))
    refused = Refused(2, ("allocscope play: ", str(snapshot)))
    refused.assert_said_by(machine, "play", str(machine.folder / f"{RUN}.run.json"))


def test_what_is_in_use_is_refused_by_name_and_its_holder_goes_on(fleet: Fleet) -> None:
    collector, daemon, machine = fleet.collector, fleet.daemon, fleet.machine
    other = f"sqlite:///{machine.folder / 'other.db'}"
    free = ("--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    for key, flag in (("grpc", "--grpc-listen"), ("http", "--http-listen")):
        taken = collector.addresses[key]
        Refused(1, (taken, flag, "in use")).assert_said_by(
            machine, "collector", "--database", other, *free, flag, taken
        )
    spool, socket_ = ("--spool", str(machine.folder / "other-spool")), ("--socket", str(machine.folder / "other.sock"))
    metrics = ("--metrics-listen", "127.0.0.1:0")
    taken = daemon.addresses["socket"]
    Refused(1, (taken, "another daemon")).assert_said_by(machine, "daemon", *spool, *metrics, "--socket", taken)
    taken = daemon.addresses["metrics"]
    Refused(1, (taken, "in use")).assert_said_by(machine, "daemon", *spool, *socket_, "--metrics-listen", taken)
    taken = str(machine.folder / "spool-daemon-n1")
    Refused(1, (taken,)).assert_said_by(machine, "daemon", *socket_, *metrics, "--spool", taken)
    fleet.assert_whole(fleet.play(job="undisturbed"))


def test_a_folder_that_cannot_be_written_is_refused_by_name(machine: Machine) -> None:
    file = machine.folder / "file"
    file.write_text("in the way")
    places = [file / "below", machine.folder / "not-there" / "deep"]
    if os.geteuid() != 0:
        closed = machine.folder / "closed"
        closed.mkdir(mode=0o500)
        places.append(closed)
    free = ("--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
    for place in places:
        Refused(1, (str(place),)).assert_said_by(machine, "collector", "--database", f"sqlite:///{place}/a.db", *free)
    daemon = ("daemon", "--socket", str(machine.folder / "a.sock"), "--metrics-listen", "127.0.0.1:0")
    Refused(1, (str(file / "below"),)).assert_said_by(machine, *daemon, "--spool", str(file / "below"))


def test_a_database_of_a_newer_allocscope_is_refused_and_not_touched(machine: Machine) -> None:
    collector = machine.collector()
    machine.end(collector)
    with closing(sqlite3.connect(machine.database, isolation_level=None)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = machine.database.read_bytes()
    url = f"sqlite:///{machine.database}"
    Refused(1, (url, "'9999'", "newer")).assert_said_by(machine, "collector", "--database", url)
    assert machine.database.read_bytes() == before


def test_every_wrong_line_of_a_settings_file_is_told_at_once_with_the_nearest_right_name(machine: Machine) -> None:
    file = machine.folder / "settings.toml"
    file.write_text(
        'htp_listen = "127.0.0.1:0"\ndatabase = "postgres://x"\nretire_after_s = "soon"\ncommit_batches = 0\n'
    )
    words = (
        "4 problem(s)",
        str(file),
        "htp_listen",
        "http_listen",
        "postgres://x",
        "'soon'",
        "commit_batches",
        "from 1 to 4096",
    )
    Refused(2, words).assert_said_by(machine, "collector", "--config", str(file))
    file.write_text('colector = "127.0.0.1:1"\nspool_limit_bytes = -1\nnvml = "maybe"\n')
    words = (
        "3 problem(s)",
        str(file),
        "colector",
        "'collector'",
        "spool_limit_bytes",
        "-1",
        "'maybe'",
        "true or false",
    )
    Refused(2, words).assert_said_by(machine, "daemon", "--config", str(file))


def test_a_job_without_a_daemon_plays_on_and_says_what_was_not_taken(machine: Machine) -> None:
    short = ("--flush-timeout", "0.1", "--json")
    nobody = str(machine.folder / "nobody.sock")
    done = machine.run("play", str(recording("kv_serve-1-4114")), "--speed", "1000", "--socket", nobody, *short)
    assert done.returncode == 3
    summary = json.loads(done.stdout)
    assert (summary["ended"], summary["samples"], summary["events"]) == ("died", 528, 1)
    assert summary["unacknowledged"] == 528 + 1 + summary["block_maps"]
