"""The captures' spool: each is there whole or not at all, after any crash; its size is bounded, and what is lost is counted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from allocscope.daemon import capture_spool, packing
from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_spool import CaptureSpool, SpooledCapture
from allocscope.daemon.errors import SpoolError
from allocscope.daemon.observed import Observed
from allocscope.daemon.packing import Packing, SnapshotUnusable, strip
from allocscope.model import CaptureReason
from allocscope.model.wire import capture_to_wire, process_to_wire
from allocscope.proto.v1.capture_service_pb2 import CaptureHello
from tests.daemon.capture_fakes import ID, dropped, note, unpacked
from tests.daemon.fakes import process

LIMIT = 1 << 20
RANDOM = os.urandom(300_000)
"""Does not shrink."""


class Spooled:
    """A spool whose clock a test sets."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.now_s = 4e9
        self.open()

    def open(self) -> None:
        """As a daemon does that starts."""
        self.observed = Observed()
        losses = CaptureLosses(self.observed)
        self.spool = CaptureSpool(self.folder, self.limit_bytes, losses, clock=lambda: self.now_s)

    def pack(
        self,
        snapshot: bytes | None,
        capture_id: str = ID,
        *,
        largest_bytes: int = LIMIT,
        finish: bool = True,
        **changes,
    ) -> Packing:
        hello = CaptureHello(
            capture=capture_to_wire(note(process(), capture_id, **changes).capture), process=process_to_wire(process())
        )
        file = None
        if snapshot is not None:
            (self.folder.parent / "snapshot").write_bytes(snapshot)
            file = (self.folder.parent / "snapshot").open("rb")
        packing = Packing(self.spool, hello, file, largest_bytes=largest_bytes)
        try:
            while packing.step():
                pass
            if finish:
                packing.finish()
        except BaseException:
            packing.abandon()
            raise
        return packing

    def held(self) -> list[str]:
        return [capture.capture_id for capture in self.spool.captures()]

    def read(self, capture_id: str = ID) -> tuple[CaptureHello, bytes | None]:
        capture = self.spool.get(capture_id)
        assert capture is not None
        stored = self.spool.open(capture)
        assert stored is not None
        packed = b"".join(iter(stored.piece, b""))
        stored.close()
        return stored.hello, unpacked(packed) if packed else None

    def dropped(self) -> dict[str, float]:
        return dropped(self.observed)


@pytest.fixture
def here(tmp_path):
    return Spooled(tmp_path / "captures")


@pytest.mark.parametrize(
    "snapshot", [b"", b"x", b"snapshot" * 400_000, RANDOM], ids=["empty", "byte", "text", "random"]
)
def test_a_capture_is_there_with_its_snapshot_after_a_restart(here, snapshot):
    here.pack(snapshot, largest_bytes=1 << 22)
    here.open()
    hello, found = here.read()
    assert found == snapshot
    assert hello.capture.snapshot_bytes == len(snapshot)
    assert hello.process == process_to_wire(process())
    assert here.held() == [ID]
    assert here.spool.bytes == sum(path.stat().st_size for path in here.folder.iterdir())


def test_a_capture_without_a_snapshot_says_so(here):
    here.pack(None, snapshot_bytes=77, problem="p" * 600)
    hello, found = here.read()
    assert (found, hello.capture.HasField("snapshot_bytes"), hello.capture.problem) == (None, False, "p" * 500)


def test_a_crash_in_the_middle_leaves_nothing(here):
    crashed = here.pack(RANDOM, finish=False)
    assert [path.name for path in here.folder.iterdir()] == [f"{ID}.capture.part"]
    here.open()
    assert (list(here.folder.iterdir()), here.held(), here.dropped()) == ([], [], {})
    crashed.abandon()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-1], id="the end is cut off"),
        pytest.param(lambda content: content[:10], id="next to nothing is left"),
        pytest.param(lambda content: b"", id="nothing is left"),
        pytest.param(lambda content: b"\0" * len(content), id="zeros"),
        pytest.param(lambda content: content[:-30] + b"\1" + content[-29:], id="a byte of the hello"),
        pytest.param(lambda content: content[-60:], id="the hello's beginning is cut off"),
    ],
)
def test_a_damaged_one_is_dropped_and_the_others_stay(here, damage):
    here.pack(b"snapshot")
    here.pack(b"other", "a" * 32)
    path = here.folder / f"{ID}.capture"
    path.write_bytes(damage(path.read_bytes()))
    assert here.spool.open(SpooledCapture(ID, 1, 1, True, False)) is None
    path.write_bytes(b"damaged, too")
    here.open()
    assert here.held() == ["a" * 32]
    assert here.dropped() == {"damaged": 1}
    assert [path.name for path in here.folder.iterdir()] == [f"{'a' * 32}.capture"]


def test_one_that_somebody_took_away_is_passed_over(here):
    here.pack(b"snapshot")
    (here.folder / f"{ID}.capture").unlink()
    (capture,) = here.spool.captures()
    assert here.spool.open(capture) is None
    assert (here.held(), here.dropped()) == ([], {})


def test_others_files_stay(here):
    (here.folder / "README").touch()
    (here.folder / "notes.capture").touch()
    here.open()
    assert sorted(path.name for path in here.folder.iterdir()) == ["README", "notes.capture"]


def test_when_it_is_full_the_oldest_go(here):
    for letter in "abcd":
        here.pack(RANDOM, letter * 32)
    assert here.held() == [letter * 32 for letter in "bcd"]
    assert here.dropped() == {"spool_full": 1}
    assert here.spool.bytes <= LIMIT
    here.open()
    assert sorted(here.held()) == [letter * 32 for letter in "bcd"]


def test_many_small_ones_are_bounded_too(here, monkeypatch):
    monkeypatch.setattr(capture_spool, "MOST_CAPTURES", 3)
    for letter in "abcde":
        here.pack(None, letter * 32)
    assert here.held() == [letter * 32 for letter in "cde"]


def test_one_that_is_larger_than_everything_costs_no_other(here):
    here.pack(b"other", "a" * 32)
    with pytest.raises(SnapshotUnusable) as caught:
        here.pack(RANDOM * 4, largest_bytes=1 << 22)
    assert (caught.value.reason, caught.value.why) == (
        "too_large",
        "the snapshot fills more than captures_limit_bytes, 1048576 bytes",
    )
    assert (here.held(), here.dropped()) == (["a" * 32], {})
    assert [path.name for path in here.folder.iterdir()] == [f"{'a' * 32}.capture"]


def test_a_snapshot_that_grows_while_it_is_read_ends_at_the_limit(here):
    with pytest.raises(SnapshotUnusable) as caught:
        here.pack(RANDOM, largest_bytes=200_000)
    assert caught.value.why == "the snapshot has 300000 bytes or more, the limit is 200000 (capture_largest_bytes)"


def test_a_disk_that_is_nearly_full_is_left_to_the_batches(here, monkeypatch):
    full = os.statvfs(here.folder)
    monkeypatch.setattr(packing, "LEFT_FREE_RATIO", 1.1)
    monkeypatch.setattr(packing, "MOST_LEFT_FREE_BYTES", full.f_blocks * full.f_frsize * 2)
    with pytest.raises(OSError, match="are left free") as caught:
        here.pack(b"snapshot")
    assert caught.value.errno == errno.ENOSPC
    assert (list(here.folder.iterdir()), here.held()) == ([], [])


def test_what_no_collector_takes_for_a_week_goes(here):
    here.pack(b"old", "a" * 32)
    here.now_s += 3 * 86400
    here.pack(b"new", "b" * 32)
    here.now_s += 4 * 86400 + 1
    here.spool.drop_old()
    assert (here.held(), here.dropped()) == (["b" * 32], {"too_old": 1})


def test_a_given_up_snapshot_leaves_what_else_is_known_and_why(here):
    here.pack(RANDOM)
    (capture,) = here.spool.captures()
    strip(here.spool, capture, "the collector refused it: too large")
    here.open()
    hello, found = here.read()
    assert (found, hello.capture.problem) == (None, "the collector refused it: too large")
    assert here.spool.bytes < 1000


def test_somebody_waits_for_what_was_asked_for(here):
    for letter, reason in (("a", CaptureReason.OOM), ("b", CaptureReason.ASKED)):
        here.pack(None, letter * 32, reason=reason)
    assert [capture.is_asked_for for capture in here.spool.captures()] == [False, True]
    here.open()
    assert {capture.capture_id[0]: capture.is_asked_for for capture in here.spool.captures()} == {"a": False, "b": True}


def test_a_folder_that_cannot_be_had_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpoolError, match=r"cannot keep the spool in .*file/captures: Not a directory"):
        Spooled(tmp_path / "file" / "captures")
