"""`allocscope play` behaves toward a daemon as the recorded process did, and ends as it did."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from allocscope.cli import play
from allocscope.model import EventKind
from tests.allocator.made import MIB, START_US, alloc, asked_free, completed_free, got, oom, write_recording
from tests.probe.receiver import LONG_S, Receiver

A = 0x7F0000000000
SECOND = 1_000_000
HEALTHY = [
    got(A, 32 * MIB),
    alloc(A, 30 * MIB, time_us=START_US + SECOND // 2),
    asked_free(A, time_us=START_US + 25 * SECOND),
    completed_free(A, time_us=START_US + 25 * SECOND),
]
DEATH = [*HEALTHY[:2], oom(40 * MIB, 0, time_us=START_US + 24 * SECOND), *HEALTHY[2:]]


@pytest.fixture
def daemon(tmp_path):
    with Receiver(tmp_path / "s") as receiver:
        yield receiver


def command(path, daemon, *more):
    return [sys.executable, "-m", "allocscope.cli", "play", str(path), "--socket", str(daemon.socket), *more]


def played(path, daemon, *more, speed=200):
    """The play as a process of its own: its exit status, and its last words."""
    done = subprocess.run(
        command(path, daemon, "--speed", str(speed), "--json", *more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("ALLOCSCOPE_")},
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_a_healthy_run_is_handed_on_whole_and_ends_in_order(tmp_path, daemon):
    before_us = time.time_ns() // 1000
    status, told = played(write_recording(tmp_path, HEALTHY), daemon)
    assert status == 0
    assert (told["samples"], told["events"], told["unacknowledged"], told["ended"]) == (25, 1, 0, "finished")
    assert told["oom_us"] is None
    samples, maps, events = daemon.samples(), daemon.block_maps(), daemon.events()
    assert len(samples) == 25
    assert len(maps) == told["block_maps"] >= 2
    assert [event.kind for event in events] == [EventKind.STOPPED]
    assert sorted(daemon.numbers()) == list(range(1, 26 + len(maps) + 1))
    assert told["start_us"] >= before_us
    assert [sample.time_us - told["start_us"] for sample in samples] == [k * SECOND for k in range(1, 26)]
    assert events[0].time_us == told["start_us"] + 25 * SECOND
    assert samples[0].allocated_bytes == 30 * MIB
    assert samples[0].device_free_bytes == (1024 - 100 - 32) * MIB
    assert samples[0].process_used_bytes == 132 * MIB


def test_a_run_that_died_ends_with_its_event_and_status_1(tmp_path, daemon):
    status, told = played(write_recording(tmp_path, DEATH), daemon)
    assert (status, told["ended"], told["events"], told["unacknowledged"]) == (1, "died", 1, 0)
    (event,) = daemon.events()
    assert (event.kind, event.time_us) == (EventKind.OOM, told["oom_us"])
    assert told["oom_us"] == told["start_us"] + 24 * SECOND
    assert event.requested_bytes == 40 * MIB
    assert event.process_id == told["process_id"]


def test_the_process_is_who_it_is_told_to_be(tmp_path, daemon):
    path = write_recording(tmp_path, HEALTHY, conf="max_split_size_mb:64")
    who = ("--job", "train", "--rank", "3", "--world-size", "8", "--gpu-uuid", "GPU-7", "--gpu-index", "5")
    _, told = played(path, daemon, *who)
    (hello,) = daemon.hellos()
    assert (hello.job, hello.rank, hello.world_size, hello.process_id) == ("train", 3, 8, told["process_id"])
    assert (hello.allocator_conf, hello.program, hello.started_us) == ("max_split_size_mb:64", "made", told["start_us"])
    (device,) = hello.devices
    assert (device.uuid, device.index, device.total_bytes, device.allowed_bytes) == ("GPU-7", 5, 1024 * MIB, None)
    assert {request.samples.allocator.device_uuid for request in daemon.requests() if request.HasField("samples")} == {
        "GPU-7"
    }


def test_it_begins_when_it_is_told_to(tmp_path, daemon):
    """A moment that has gone by is made up for at once."""
    start = time.time() - 3600
    _, told = played(write_recording(tmp_path, HEALTHY), daemon, "--start-at", f"{start:.3f}", speed=1)
    assert told["start_us"] == round(round(start, 3) * SECOND)
    assert daemon.samples()[-1].time_us == told["start_us"] + 25 * SECOND


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(tmp_path, daemon, number):
    process = subprocess.Popen(
        command(write_recording(tmp_path, HEALTHY), daemon, "--speed", "4", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        daemon.wait_for(daemon.samples)
        process.send_signal(number)
        out, err = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    told = json.loads(out)
    assert (process.returncode, err, told["ended"], told["unacknowledged"]) == (0, "", "stopped", 0)
    assert [event.kind for event in daemon.events()] == [EventKind.STOPPED]
    assert daemon.events()[0].time_us == daemon.samples()[-1].time_us


def test_without_a_daemon_what_was_not_acknowledged_is_counted_and_told(tmp_path):
    path = write_recording(tmp_path, DEATH)
    done = subprocess.run(
        command(path, Receiver(tmp_path / "none"), "--speed", "1000", "--flush-timeout", "0.1", "--json"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["ended"]) == (3, "died")
    assert told["unacknowledged"] == told["samples"] + told["block_maps"] + told["events"]
    left = told["unacknowledged"]
    assert done.stderr == (
        f"allocscope play: {left:,} of {left:,} items were not acknowledged by a daemon at {tmp_path}/none: does one run (allocscope daemon), and there"
        " (--socket)?\n"
    )


def test_a_daemon_that_is_not_there_is_told_of_while_it_plays_on(tmp_path):
    socket = tmp_path / "late"
    process = subprocess.Popen(
        command(write_recording(tmp_path, HEALTHY), Receiver(socket), "--speed", "1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == (
            f"allocscope play: no daemon answers at {socket} yet; going on, at most 4,096 items are kept\n"
        )
        with Receiver(socket) as late:
            late.wait_for(late.samples)
            process.terminate()
            assert (process.communicate(timeout=LONG_S)[1], process.returncode) == ("", 0)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "made.pickle.gz").write_bytes(b"\x1f\x8b\x08"), "cut off"),
        (lambda folder: (folder / "made.pickle.gz").unlink(), "cannot be read (No such file or directory)"),
        (lambda folder: (folder / "made.run.json").write_text("{}"), "lacks snapshot"),
    ],
)
def test_a_recording_that_cannot_be_used_is_told_with_status_2(tmp_path, capsys, damage, message):
    path = write_recording(tmp_path, HEALTHY)
    damage(tmp_path)
    assert play.main([str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("allocscope play: ")
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--speed", "0"], "0 is not a number above 0"),
        (["--speed", "fast"], "fast is not a number above 0"),
        (["--rank", "1.5"], "1.5 is not a whole number from 0 on"),
        (["--start-at", "noon"], "noon is not a unix time in seconds"),
        (["--speed", "nan"], "nan is not a number above 0"),
        (["--rank", "-1"], "-1 is not a whole number from 0 on"),
        (["--start-at", "inf"], "inf is not a unix time in seconds"),
        (["--sped", "3"], "unrecognized arguments: --sped 3"),
    ],
)
def test_an_option_that_cannot_be_used_is_told_with_status_2(tmp_path, capsys, option, message):
    with pytest.raises(SystemExit) as ended:
        play.main([str(write_recording(tmp_path, HEALTHY)), *option])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
