"""The folder that jobs write to: nothing in it is believed, everything in it is bounded, and what is a capture stays."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allocscope.daemon import capture_folder
from allocscope.daemon.capture_folder import CaptureFolder
from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_place import CapturePlace
from allocscope.daemon.observed import Observed
from allocscope.daemon.packing import SnapshotUnusable
from tests.daemon.capture_fakes import ID, dropped, leave
from tests.daemon.fakes import WAIT_S
from tests.needs import left_out

NOTE, SNAPSHOT = f"{ID}.note", f"{ID}.snapshot"
LIMIT = 1 << 20


class Folder:
    """A captures folder whose clock a test sets."""

    def __init__(self, path: Path, *, mode: int = 0o660) -> None:
        self.path, self.observed, self.late_s = path, Observed(), 0.0
        self.place = CapturePlace(path, group_id=None, socket_mode=mode)
        self.open()
        self.folder = CaptureFolder(self.place, CaptureLosses(self.observed), limit_bytes=LIMIT, clock=self._now_s)

    def open(self) -> None:
        with self.place.opened():
            pass

    def _now_s(self) -> float:
        return self.path.stat().st_ctime + self.late_s

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())

    def dropped(self) -> dict[str, float]:
        return dropped(self.observed)


@pytest.fixture
def here(tmp_path):
    return Folder(tmp_path / "captures")


def test_a_note_its_snapshot_and_one_that_is_being_written_are_seen_the_oldest_first(here):
    ids = ["a" * 32, "b" * 32, "d" * 32]
    for number, id_ in enumerate(ids):
        leave(here.path, f"{id_}.note", b"n" * (number + 1))
    leave(here.path, SNAPSHOT, b"s")
    (here.path / f".{'a' * 32}.snapshot.part").write_bytes(b"pp")
    look = here.folder.look()
    assert [(left.capture_id, left.bytes) for left in look.notes.values()] == [(ids[0], 1), (ids[1], 2), (ids[2], 3)]
    assert {id_: left.bytes for id_, left in look.snapshots.items()} == {ID: 1}
    assert {id_: left.bytes for id_, left in look.unfinished.items()} == {"a" * 32: 2}
    assert here.dropped() == {}


def test_a_note_that_is_written_anew_is_told_apart(here):
    leave(here.path, NOTE, b"one")
    before = here.folder.look().notes[ID].version
    leave(here.path, NOTE, b"two")
    assert here.folder.look().notes[ID].version != before


def _symlink(path: Path) -> None:
    path.symlink_to(path.parent.parent / "secret")


@pytest.mark.parametrize(
    ("name", "put", "reason"),
    [
        pytest.param("core.1234", Path.touch, "not_a_capture", id="another name"),
        pytest.param(f"{ID}.pickle", Path.touch, "not_a_capture", id="another ending"),
        pytest.param(f"{ID[1:]}.note", Path.touch, "not_a_capture", id="a short id"),
        pytest.param(f"{ID.upper()}.note", Path.touch, "not_a_capture", id="an id in capitals"),
        pytest.param(f".{ID}.note", Path.touch, "not_a_capture", id="hidden"),
        pytest.param(f"{ID}.note.part", Path.touch, "not_a_capture", id="a part in sight"),
        pytest.param(NOTE + "\n", Path.touch, "not_a_capture", id="a line break"),
        pytest.param(os.fsdecode(b"\xff\x1b[2J"), Path.touch, "not_a_capture", id="no text"),
        pytest.param(NOTE, _symlink, "not_a_file", id="a link for a note"),
        pytest.param(SNAPSHOT, _symlink, "not_a_file", id="a link for a snapshot"),
        pytest.param(f".{SNAPSHOT}.part", _symlink, "not_a_file", id="a link for a part"),
        pytest.param(NOTE, Path.mkdir, "not_a_file", id="a folder"),
        pytest.param(SNAPSHOT, os.mkfifo, "not_a_file", id="a pipe"),
    ],
)
def test_what_is_no_capture_is_removed_and_counted(here, name: str, put: Callable[[Path], None], reason):
    secret = here.path.parent / "secret"
    secret.write_text("keep")
    leave(here.path, f"{'a' * 32}.note", b"good")
    put(here.path / name)
    look = here.folder.look()
    assert list(look.notes) == ["a" * 32]
    assert here.names() == [f"{'a' * 32}.note"]
    assert here.dropped() == {reason: 1}
    assert secret.read_text() == "keep"


def test_a_folder_with_files_in_it_stays_and_is_told_of_once(here):
    (here.path / NOTE).mkdir()
    (here.path / NOTE / "file").touch()
    for _ in range(3):
        assert here.folder.look().notes == {}
    assert here.dropped() == {"not_a_file": 1}
    (here.path / NOTE / "file").unlink()
    (here.path / NOTE).rmdir()
    leave(here.path, NOTE, b"note")
    here.folder.look()
    assert list(here.folder.look().notes) == [ID]


def test_a_note_that_is_too_large_is_not_read(here):
    (here.path / NOTE).touch()
    os.truncate(here.path / NOTE, (4 << 20) + 1)
    with pytest.raises(ValueError, match=r"^a note of 4194305 bytes \(at most 4194304\)$"):
        here.folder.read_note(ID)


@pytest.mark.parametrize("put", [os.mkfifo, _symlink, Path.mkdir], ids=["pipe", "link", "folder"])
def test_what_takes_a_files_place_after_the_look_is_not_opened(here, put):
    (here.path.parent / "secret").write_text("keep")
    put(here.path / NOTE)
    put(here.path / SNAPSHOT)
    with pytest.raises(ValueError, match=NOTE):
        here.folder.read_note(ID)
    with pytest.raises(SnapshotUnusable) as caught:
        here.folder.open_snapshot(ID, os.getuid(), LIMIT)
    assert caught.value.reason == "unreadable"


def test_a_second_name_of_somebody_elses_file_is_not_read(here):
    secret = here.path.parent / "secret"
    secret.write_bytes(b"keep")
    os.link(secret, here.path / NOTE)
    with pytest.raises(ValueError, match="is no regular file with one name"):
        here.folder.read_note(ID)


def test_a_snapshot_is_its_notes_owners_and_within_the_limit(here):
    leave(here.path, SNAPSHOT, b"snapshot")
    with here.folder.open_snapshot(ID, os.getuid(), 8) as file:
        assert file.read() == b"snapshot"
    for uid, largest_bytes, reason in ((os.getuid() + 1, 8, "foreign_owner"), (os.getuid(), 7, "too_large")):
        with pytest.raises(SnapshotUnusable) as caught:
            here.folder.open_snapshot(ID, uid, largest_bytes)
        assert caught.value.reason == reason


def test_removing_a_capture_removes_all_of_it_and_nothing_else(here):
    for name in (NOTE, SNAPSHOT, f".{NOTE}.part", f".{SNAPSHOT}.part", f"{'a' * 32}.note"):
        (here.path / name).touch()
    here.folder.remove(ID)
    here.folder.remove(ID)
    assert here.names() == [f"{'a' * 32}.note"]


@pytest.mark.parametrize(
    ("name", "after_s", "reason"),
    [
        pytest.param(f".{SNAPSHOT}.part", capture_folder.UNFINISHED_S, "unfinished", id="a dead process's part"),
        pytest.param(f".{NOTE}.part", capture_folder.UNFINISHED_S, "unfinished", id="a dead process's part of a note"),
        pytest.param(SNAPSHOT, capture_folder.ALONE_S, "no_note", id="a snapshot without a note"),
        pytest.param(NOTE, capture_folder.OLDEST_S, "too_old", id="a note that nothing could keep"),
    ],
)
def test_what_stays_too_long_is_dropped_and_not_before(here, name, after_s, reason):
    (here.path / name).touch()
    here.late_s = after_s - 2
    here.folder.look()
    assert (here.names(), here.dropped()) == ([name], {})
    here.late_s = after_s + 2
    here.folder.look()
    assert (here.names(), here.dropped()) == ([], {reason: 1})


def test_a_time_that_a_job_gives_its_file_does_not_count(here):
    (here.path / SNAPSHOT).touch()
    os.utime(here.path / SNAPSHOT, (1, 1))
    here.folder.look()
    assert here.names() == [SNAPSHOT]


def test_beyond_its_bytes_the_oldest_are_dropped(here):
    for letter in "abc":
        (here.path / f"{letter * 32}.note").touch()
        os.truncate(here.path / f"{letter * 32}.note", 400_000)
    look = here.folder.look()
    assert sorted(look.notes) == ["b" * 32, "c" * 32]
    assert here.names() == [f"{'b' * 32}.note", f"{'c' * 32}.note"]
    assert here.dropped() == {"folder_full": 1}


def test_beyond_its_number_of_files_the_oldest_are_dropped(here, monkeypatch):
    monkeypatch.setattr(capture_folder, "MOST_FILES", 3)
    for letter in "abcdef":
        leave(here.path, f"{letter * 32}.note", b"")
    assert list(here.folder.look().notes) == [letter * 32 for letter in "def"]
    assert here.dropped() == {"folder_full": 3}


def test_a_flood_is_looked_at_in_parts(here, monkeypatch):
    monkeypatch.setattr(capture_folder, "MOST_LOOKED_AT", 10)
    for number in range(25):
        (here.path / f"flood-{number}").touch()
    for left in (15, 5, 0):
        here.folder.look()
        assert len(here.names()) == left
    assert here.dropped() == {"not_a_capture": 25}


# the place


@pytest.mark.parametrize(
    ("socket_mode", "mode"), [(0o660, 0o3730), (0o666, 0o3733), (0o600, 0o3700), (0o606, 0o3703), (0o640, 0o3700)]
)
def test_who_may_write_to_the_socket_may_leave_captures_but_not_see_or_remove_others(tmp_path, socket_mode, mode):
    here = Folder(tmp_path / "captures", mode=socket_mode)
    assert stat.S_IMODE(here.path.stat().st_mode) == mode


def test_the_rights_that_hold_now_replace_those_of_an_earlier_start(tmp_path):
    Folder(tmp_path / "captures", mode=0o666).place.close()
    Folder(tmp_path / "captures", mode=0o600)
    assert stat.S_IMODE((tmp_path / "captures").stat().st_mode) == 0o3700


def test_a_folder_that_was_taken_away_is_made_anew(here):
    here.path.rmdir()
    assert here.folder.look().notes == {}
    assert stat.S_IMODE(here.path.stat().st_mode) == 0o3730


@pytest.mark.parametrize("put", [_symlink, Path.touch], ids=["link", "file"])
def test_a_link_or_file_in_the_folders_place_is_not_used(tmp_path, put):
    (tmp_path / "secret").mkdir()
    path = tmp_path / "in" / "captures"
    path.parent.mkdir()
    put(path)
    place = CapturePlace(path, group_id=None, socket_mode=0o660)
    with pytest.raises(OSError), place.opened():
        pass


STRANGER = """
import os, sys
os.setgroups([]); os.setgid(54321); os.setuid(54321)
folder, name = sys.argv[1:]
os.close(os.open(f"{folder}/{'b' * 32}.note", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))
for attempt in (lambda: os.listdir(folder), lambda: os.unlink(f"{folder}/{name}"), lambda: os.rename(f"{folder}/{name}", f"{folder}/x")):
    try:
        attempt()
    except PermissionError:
        continue
    sys.exit("it may")
"""


def test_another_users_job_may_leave_files_and_do_nothing_else(tmp_path):
    if os.geteuid():
        left_out("root", "run the tests as root, which may become another user")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)
    here = Folder(tmp_path / "captures", mode=0o666)
    leave(here.path, NOTE, b"ours")
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, here.path, NOTE], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    look = here.folder.look()
    assert {left.uid for left in look.notes.values()} == {0, 54321}
    assert {(here.path / left.name).stat().st_gid for left in look.notes.values()} == {os.getegid()}
    assert here.folder.read_note("b" * 32) == (b"", 54321)


def test_another_users_folder_is_not_used(tmp_path):
    if os.geteuid():
        left_out("root", "run the tests as root, which may give a folder away")
    path = tmp_path / "captures"
    path.mkdir()
    os.chown(path, 54321, -1)
    place = CapturePlace(path, group_id=None, socket_mode=0o660)
    with (
        pytest.raises(PermissionError, match=r"the folder is user 54321's, not the daemon's; remove it"),
        place.opened(),
    ):
        pass


def test_one_daemon_takes_them_until_it_ends(here):
    other = CapturePlace(here.path, group_id=None, socket_mode=0o660)
    with pytest.raises(OSError, match="another daemon takes them; give this one a socket in a folder of its own"):
        other.opened().__enter__()
    here.place.close()
    with other.opened():
        pass
    with pytest.raises(OSError, match="another daemon takes them"):
        here.folder.look()
