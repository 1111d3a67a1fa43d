"""A service's log that cannot be written: the service goes on, and says later how much was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from allocscope.cli.service_log import ServiceLog
from tests.e2e.processes import until

FULL = Path("/dev/full")
WAIT_S = 30.0
SERVICES = {
    "daemon": (
        "--collector=127.0.0.1:1", "--socket={folder}/d.sock", "--spool={folder}/spool", "--nvml=false",
        "--metrics-listen=127.0.0.1:0", "--interval-s=0.05",
    ),
    "collector": ("--database=sqlite:///{folder}/c.db", "--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"),
}  # fmt: skip


def runs_and_ends_well(service: str, folder: Path, log_format: str = "console", **stderr: object) -> None:
    flags = [flag.format(folder=folder) for flag in SERVICES[service]]
    addresses = folder / "addresses.json"
    command = [sys.executable, "-m", "allocscope.cli", service, *flags, f"--log-format={log_format}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}
    with subprocess.Popen([*command, f"--addresses-file={addresses}"], env=environ, **stderr) as process:  # type: ignore[call-overload]
        try:
            until(lambda: addresses.exists() or process.poll() is not None, "it is ready, or has ended")
            assert process.poll() is None, "it has ended"
            told = json.loads(addresses.read_text())
            with urllib.request.urlopen(
                f"http://{told.get('http') or told['metrics']}/metrics", timeout=WAIT_S
            ) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize("service", SERVICES)
def test_a_full_disk_under_the_log_ends_no_service(service, log_format, tmp_path):
    with FULL.open("wb") as full:
        runs_and_ends_well(service, tmp_path, log_format, stderr=full)


@pytest.mark.parametrize("service", SERVICES)
def test_a_log_that_nobody_reads_any_more_ends_no_service(service, tmp_path):
    read, write = os.pipe()
    os.close(read)
    try:
        runs_and_ends_well(service, tmp_path, stderr=write)
    finally:
        os.close(write)


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)


@pytest.mark.parametrize("service", SERVICES)
def test_a_reader_of_the_log_that_hangs_stalls_no_service(service, tmp_path):
    read, write = os.pipe()
    try:
        fill(write)
        runs_and_ends_well(service, tmp_path, stderr=write)
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_without_standard_streams_runs(service, tmp_path):
    runs_and_ends_well(service, tmp_path, preexec_fn=lambda: os.closerange(0, 3))


def test_what_was_lost_is_told_with_the_next_line_that_can_be_written(tmp_path):
    path = tmp_path / "log"
    descriptor = os.open(FULL, os.O_WRONLY)
    try:
        log = ServiceLog(descriptor)
        print("one\ntwo", file=log, flush=True)
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
        print("three", file=log, flush=True)
        print("four", file=log, flush=True)
    finally:
        os.close(descriptor)
    told = "\n2 lines of this log could not be written (No space left on device)\n"
    assert path.read_text() == f"{told}three\nfour\n"


def test_lines_are_written_whole_and_what_cannot_be_encoded_is_escaped(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        log = ServiceLog(file.fileno(), "ascii")
        log.write("a")
        assert path.read_bytes() == b""
        log.write("ü\nb")
        assert path.read_bytes() == b"a\\xfc\n"
        log.flush()
    assert path.read_bytes() == b"a\\xfc\nb"
