"""Whatever the disk refuses, and whenever the process is killed: what was written is there, once, in order, value by value."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allocscope.daemon.spool import Spool
from allocscope.daemon.spool_frames import Counts
from allocscope.daemon.spool_segment import SpooledBatch

LIMIT, SEGMENT = 1 << 20, 2_000
NUMBERS = tuple(range(1, 13))


def batch(sequence: int) -> SpooledBatch:
    """Its content follows from its number; two of three have block maps."""
    maps = b"maps %d " % sequence * 20 if sequence % 3 else b""
    return SpooledBatch(sequence, b"batch %d " % sequence * 40, Counts(3, 2 if maps else 0, 1), maps)


def held(spool: Spool) -> list[SpooledBatch]:
    found, last = [], 0
    while one := spool.after(last):
        found.append(one)
        last = one.sequence
    return found


class Disk:
    """Refuses so many calls from its n-th on, as one does that is full or read-only for a while."""

    def __init__(self, fails_at: int, times: int) -> None:
        self.calls, self._fails = 0, range(fails_at, fails_at + times)

    def check(self, what: str) -> None:
        self.calls += 1
        if self.calls in self._fails:
            raise OSError(28, os.strerror(28), what)


class RawFile(io.FileIO):
    """Writes half of what it is given before it fails."""

    disk: Disk

    def write(self, content: Any, /) -> int:
        try:
            self.disk.check("write")
        except OSError:
            super().write(bytes(content)[: len(content) // 2])
            raise
        return super().write(content)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> Iterator[None]:
    """Every call by which the spool changes something."""

    def guarded(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*given: Any, **options: Any) -> Any:
            disk.check(what)
            return call(*given, **options)

        return checked

    def opened(path: Path, mode: str = "r", *given: Any, **options: Any) -> Any:
        if "w" not in mode:
            return plain_open(path, mode, *given, **options)
        disk.check("open")
        raw = RawFile(path, mode)
        raw.disk = disk
        return raw

    plain_open = Path.open
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)
        for owner, name in ((Path, "unlink"), (Path, "replace"), (os, "fsync"), (os, "fdatasync"), (os, "truncate")):
            patched.setattr(owner, name, guarded(name, getattr(owner, name)))
        yield


def work(spool: Spool) -> None:
    """Write all, trying again what fails, as the daemon does, and acknowledge some."""
    for first in NUMBERS[::2]:
        while True:
            try:
                spool.write([batch(first), batch(first + 1)])
                break
            except OSError:
                continue
        if first == 5:
            spool.acknowledge(3)


@pytest.mark.parametrize("times", [1, 6])
def test_a_disk_that_refuses_calls_at_any_moment_loses_and_doubles_nothing(tmp_path, monkeypatch, times):
    expected = [batch(sequence) for sequence in NUMBERS if sequence > 3]
    fails_at, total = 0, 1
    while fails_at <= total:
        fails_at += 1
        folder = tmp_path / str(fails_at)
        spool, disk = Spool(folder, LIMIT, SEGMENT), Disk(fails_at, times)
        with failing(monkeypatch, disk):
            work(spool)
        total = disk.calls
        assert held(spool) == expected, fails_at
        assert spool.lost == []
        spool.close()
        spool = Spool(folder, LIMIT, SEGMENT)
        found = {one.sequence: one for one in held(spool)}
        assert [found[one.sequence] for one in expected] == expected, fails_at
        assert sorted(found) == [one.sequence for one in held(spool)]
        assert [loss for loss in spool.lost if loss.batches or loss.reason != "torn"] == []
        spool.close()
    assert total > 30


WRITER = """
import sys
from pathlib import Path
from allocscope.daemon.spool import Spool
from tests.daemon.test_spool_disk import LIMIT, SEGMENT, batch
spool = Spool(Path(sys.argv[1]), LIMIT, SEGMENT)
for loss in spool.lost:
    assert (loss.reason, loss.batches) == ("torn", 0), loss
print("from", spool.next_sequence, flush=True)
while True:
    sequence = spool.next_sequence
    spool.write([batch(sequence), batch(sequence + 1)])
    print(sequence + 1, flush=True)
"""


def test_kill_9_at_random_moments_loses_nothing_that_was_written(tmp_path):
    chance, told, started = random.Random(11), [], []
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        started.append(int(writer.stdout.readline().split()[1]))
        told += [int(writer.stdout.readline()) for _ in range(chance.randrange(1, 60))]
        writer.kill()
        told += [int(line) for line in writer.stdout.read().splitlines() if line.isdecimal()]
        writer.wait()
        writer.stdout.close()
    spool = Spool(tmp_path, LIMIT, SEGMENT)
    found = held(spool)
    assert found == [batch(one.sequence) for one in found], "each is as it was written"
    sequences = [one.sequence for one in found]
    assert sequences == sorted(set(sequences))
    assert {number for last in told for number in (last - 1, last)} <= set(sequences)
    assert started == sorted(started)
    spool.close()
