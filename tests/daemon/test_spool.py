"""The spool: what was written is there after any crash, in order, once; numbers go on; its size is bounded, losses counted."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allocscope.daemon.errors import SpoolError, SpoolTaken
from allocscope.daemon.spool import Spool
from allocscope.daemon.spool_frames import Counts
from allocscope.daemon.spool_segment import Loss, SpooledBatch

LIMIT = 1 << 20

payloads = st.lists(st.binary(max_size=60), min_size=1, max_size=12)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def batches(*contents: bytes, first: int = 1) -> list[SpooledBatch]:
    return [SpooledBatch(first + i, content, Counts(samples=len(content))) for i, content in enumerate(contents)]


def held(spool: Spool) -> list[tuple[int, bytes]]:
    found, last = [], 0
    while batch := spool.after(last):
        found.append((batch.sequence, batch.payload))
        last = batch.sequence
    return found


@contextmanager
def spool_in(folder: Path, limit: int = LIMIT, segment: int = 4096):
    spool = Spool(folder, limit, segment)
    try:
        yield spool
    finally:
        spool.close()


@contextmanager
def files_no_larger_than(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def crash(spool: Spool) -> None:
    """What kill -9 does: files are closed, and nothing is said."""
    spool._close_newest()
    spool._lock.close()


def newest_segment(folder: Path) -> Path:
    return max(folder.glob("*.spool"))


def test_batches_are_there_in_order_until_they_are_acknowledged(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a", b"b", b"c"))
        assert held(spool) == [(1, b"a"), (2, b"b"), (3, b"c")]
        spool.acknowledge(2)
        assert held(spool) == [(3, b"c")]
        assert (spool.batches, spool.next_sequence) == (1, 4)


def test_a_restart_finds_what_was_not_acknowledged_and_goes_on_counting(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a", b"b"))
        spool.acknowledge(1)
        daemon_id = spool.daemon_id
    with spool_in(tmp_path) as spool:
        assert (spool.daemon_id, spool.next_sequence, held(spool)) == (daemon_id, 3, [(2, b"b")])
        spool.write(batches(b"c", first=3))
        assert held(spool) == [(2, b"b"), (3, b"c")]


def test_numbers_go_on_when_nothing_is_left_to_tell_them(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(*[b"x" * 1000] * 20))
        spool.acknowledge(20)
        assert list(tmp_path.glob("*.spool")) == []
        assert spool.size_bytes == 0
    with spool_in(tmp_path) as spool:
        assert (spool.next_sequence, held(spool), spool.lost) == (21, [], [])


@quick
@given(groups=st.lists(payloads, min_size=1, max_size=4), data=st.data())
def test_a_crash_at_any_byte_loses_only_what_was_not_whole(groups, data):
    with TemporaryDirectory() as name:
        folder, written = Path(name), []
        spool = Spool(folder, LIMIT, 256)
        for group in groups:
            new = batches(*group, first=spool.next_sequence)
            spool.write(new)
            written += new
        crash(spool)
        path = newest_segment(folder)
        cut = data.draw(st.integers(0, path.stat().st_size))
        ends = {batch.sequence: end for batch, end in frame_ends(path, written)}
        os.truncate(path, cut)
        with spool_in(folder, segment=256) as spool:
            expected = [(b.sequence, b.payload) for b in written if ends.get(b.sequence, 0) <= cut]
            assert held(spool) == expected
            assert spool.next_sequence > max((sequence for sequence, _ in expected), default=0)
            torn = cut - max((end for end in ends.values() if end <= cut), default=0)
            lost = [(loss.reason, loss.batches, loss.bytes) for loss in spool.lost]
            assert lost == ([("torn", 0, torn)] if torn else []), "what was never on disk is no loss: it is sent again"
            first = max((sequence for sequence, _ in expected), default=0) + 1
            if torn:
                assert spool.next_sequence - spool.unused_at_start == first
            more = batches(b"more", first=spool.next_sequence)
            spool.write(more)
            assert held(spool)[-1] == (more[0].sequence, b"more")


def frame_ends(path: Path, written: list[SpooledBatch]) -> list[tuple[SpooledBatch, int]]:
    """Where each batch of a segment ends: a frame is its payload and 28 bytes."""
    end, found = 0, []
    for batch in written:
        if batch.sequence >= int(path.stem):
            end += 28 + len(batch.payload)
            found.append((batch, end))
    assert end == path.stat().st_size
    return found


@quick
@given(contents=payloads, data=st.data())
def test_a_damaged_byte_is_never_taken_for_data(contents, data):
    with TemporaryDirectory() as name:
        folder = Path(name)
        with spool_in(folder) as spool:
            spool.write(batches(*contents))
        path = newest_segment(folder)
        damaged = bytearray(path.read_bytes())
        ends = frame_ends(path, batches(*contents))
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] ^= data.draw(st.integers(1, 255))
        path.write_bytes(damaged)
        with spool_in(folder) as spool:
            damaged_number = next(batch.sequence for batch, end in ends if position < end)
            whole = [(i + 1, content) for i, content in enumerate(contents) if i + 1 != damaged_number]
            assert held(spool) == whole
            reason = "torn" if damaged_number == len(contents) else "damaged"
            assert [(loss.reason, loss.batches) for loss in spool.lost] == [(reason, 1)]
            assert spool.next_sequence > len(contents)
        with spool_in(folder) as spool:
            assert (held(spool), spool.lost) == (whole, [])


def test_after_several_damages_what_is_between_is_kept_in_order_and_can_be_added_to(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(*[b"%d" % number * 100 for number in range(1, 9)]))
    path = newest_segment(tmp_path)
    damaged = bytearray(path.read_bytes())
    for number in (2, 3, 6):  # frames of 128 bytes
        damaged[128 * (number - 1) + 50] ^= 1
    path.write_bytes(damaged)
    with spool_in(tmp_path) as spool:
        assert [sequence for sequence, _ in held(spool)] == [1, 4, 5, 7, 8]
        assert spool.lost == [Loss("damaged", 2, Counts(), 256), Loss("damaged", 1, Counts(), 128)]
        assert (spool.batches, spool.next_sequence) == (5, 9)
        spool.write(batches(b"more", first=9))
        spool.acknowledge(5)
        assert [sequence for sequence, _ in held(spool)] == [7, 8, 9]


def test_bytes_before_a_segments_first_batch_cost_nothing(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a", b"b"))
    (path,) = tmp_path.glob("*.spool")
    path.write_bytes(b"nobody's" + path.read_bytes())
    for _ in range(2):
        with spool_in(tmp_path) as spool:
            assert (held(spool), spool.lost, spool.next_sequence) == ([(1, b"a"), (2, b"b")], [], 3)


def test_a_start_that_is_broken_off_amid_mending_loses_and_doubles_nothing(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"first", b"second", b"third"))
    path = newest_segment(tmp_path)
    damaged = path.read_bytes().replace(b"second", b"sec0nd")
    path.write_bytes(damaged)
    with spool_in(tmp_path) as spool:
        crash(spool)
    path.write_bytes(damaged)  # as if the end of it had not been cut off yet
    with spool_in(tmp_path) as spool:
        assert held(spool) == [(1, b"first"), (3, b"third")]


def test_zeros_at_the_end_are_no_loss_and_cost_no_number(tmp_path):
    """A power loss may leave a file that was made longer, and not written yet."""
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a", b"b"))
    path = newest_segment(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(8192))
    with spool_in(tmp_path) as spool:
        assert (held(spool), spool.lost, spool.next_sequence) == ([(1, b"a"), (2, b"b")], [], 3)
    assert path.stat().st_size == 2 * 29


def test_damage_to_what_the_collector_has_is_no_loss(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"first", b"second", b"third"))
        spool.acknowledge(2)
    path = newest_segment(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"second", b"sec0nd"))
    with spool_in(tmp_path) as spool:
        assert (held(spool), spool.lost) == ([(3, b"third")], [])


def test_what_looks_like_frames_does_not_hold_up_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("allocscope.daemon.spool_frames.SOUGHT_BYTES", 1000)
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a", (b"\x40\x00\x00\x00CRC.\x02" + bytes(7)) * 20, b"c"))
    path = newest_segment(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"CRC.", b"CRC!"))
    with spool_in(tmp_path) as spool:
        assert held(spool) == [(1, b"a")]
        assert [loss.reason for loss in spool.lost] == ["torn"]


def test_damage_while_it_runs_is_counted_and_passed_over(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"first", b"second", b"third"))
        path = newest_segment(tmp_path)
        path.write_bytes(path.read_bytes().replace(b"second", b"sec0nd"))
        assert held(spool) == [(1, b"first"), (3, b"third")]
        assert spool.lost == [Loss("damaged", 1, Counts(), 0)]


def test_a_file_that_somebody_takes_away_costs_what_was_in_it_and_no_more(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"first", b"second"))
        newest_segment(tmp_path).unlink()
        spool.write(batches(b"third", first=3))
        assert held(spool) == [(3, b"third")]
        assert spool.lost == [Loss("damaged", 1, Counts(), 0)] * 2


def test_a_full_spool_passes_over_a_file_that_somebody_took_away(tmp_path):
    with spool_in(tmp_path, limit=80_000, segment=10_000) as spool:
        spool.write(batches(*[b"x" * 972] * 80))
        spool.acknowledge(7)
        next(iter(sorted(tmp_path.glob("*.spool")))).unlink()
        spool.write(batches(b"x", first=81))
        assert spool.lost == [Loss("spool_full", 3, Counts(), 10_000)]


@pytest.mark.parametrize(
    "name", ["notes.spool", "5.spool", "\N{ARABIC-INDIC DIGIT FIVE}" * 20 + ".spool", "9" * 20 + ".spool"]
)
def test_a_file_of_somebody_elses_is_left_alone_and_costs_no_number(tmp_path, name):
    (tmp_path / name).write_text("mine")
    for contents in ([b"a"], [b"a", b"b"]):
        with spool_in(tmp_path) as spool:
            spool.write(batches(contents[-1], first=len(contents)))
            assert held(spool) == list(enumerate(contents, 1))
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_by_the_name_of_a_segment_is_left_alone(tmp_path):
    (tmp_path / "00000000000000000007.spool").mkdir(parents=True)
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a"))
        assert held(spool) == [(1, b"a")]


def test_a_full_spool_drops_its_oldest_and_says_how_much(tmp_path):
    with spool_in(tmp_path, limit=80_000, segment=10_000) as spool:
        for sequence in range(1, 101):
            spool.write(batches(b"x" * 972, first=sequence))  # a frame of 1,000 bytes
            assert spool.size_bytes <= 80_000
        assert held(spool)[0][0] == 21
        assert spool.lost == [Loss("spool_full", 10, Counts(samples=9720), 10_000)] * 2
        assert (len(held(spool)), spool.batches) == (80, 80)


def test_of_a_dropped_segment_only_what_was_not_acknowledged_is_lost(tmp_path):
    with spool_in(tmp_path, limit=80_000, segment=10_000) as spool:
        spool.write(batches(*[b"x" * 972] * 80))
        spool.acknowledge(7)
        spool.write(batches(b"x", first=81))
        assert spool.lost == [Loss("spool_full", 3, Counts(samples=3 * 972), 10_000)]


def test_a_failed_write_leaves_nothing_of_it_and_can_be_tried_again(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a"))
        new = batches(b"b" * 300, b"c" * 300, first=2)
        with files_no_larger_than(400), pytest.raises(OSError, match="File too large"):
            spool.write(new)
        assert held(spool) == [(1, b"a")]
        spool.write(new)
        assert [sequence for sequence, _ in held(spool)] == [1, 2, 3]
    with spool_in(tmp_path) as spool:
        assert ([sequence for sequence, _ in held(spool)], spool.lost) == ([1, 2, 3], [])


def test_a_collector_that_knows_more_than_the_folder_moves_the_numbers_on(tmp_path):
    """A folder put back from a copy must not give numbers that the collector has seen, and would pass over."""
    with spool_in(tmp_path) as spool:
        spool.acknowledge(500)
        assert spool.next_sequence == 501


def test_two_daemons_cannot_share_a_spool(tmp_path):
    with spool_in(tmp_path), pytest.raises(SpoolTaken) as caught:
        Spool(tmp_path, LIMIT)
    assert str(caught.value) == (
        f"cannot keep the spool in {tmp_path}: another daemon is using it (--spool names another folder)"
    )


def test_a_folder_that_cannot_be_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError) as caught:
        Spool(tmp_path / "file" / "spool", LIMIT)
    assert str(caught.value) == (
        f"cannot keep the spool in {tmp_path}/file/spool: Not a directory (--spool names another folder)"
    )


def test_a_full_disk_at_the_start_is_a_clear_error(tmp_path):
    with files_no_larger_than(10), pytest.raises(SpoolError, match="File too large"):
        Spool(tmp_path, LIMIT)


def test_a_full_disk_keeps_no_daemon_from_starting_that_was_killed_there(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"a"))
        spool.acknowledge(1)
    spool = Spool(tmp_path, LIMIT)
    spool.write(batches(b"b", b"c", first=2))
    crash(spool)
    with files_no_larger_than(10), spool_in(tmp_path) as spool:
        assert (held(spool), spool.next_sequence) == ([(2, b"b"), (3, b"c")], 4)


@pytest.mark.parametrize(
    "state",
    [
        "{",
        "",
        '{"daemon_id": "d", "next_batch": -7, "acknowledged": -9}',
        '{"daemon_id": "d", "next_batch": 7, "acknowledged": 9}',
        '{"daemon_id": "d", "next_batch": 9223372036854775808, "acknowledged": 9}',
        '{"daemon_id": "d", "next_batch": Infinity, "acknowledged": 9}',
        '{"daemon_id": "d", "next_batch": 7, "acknowledged": 6, "late": [[1e400, 2]]}',
        '{"daemon_id": null, "next_batch": 7, "acknowledged": 6}',
        "[" * 100_000,
    ],
    ids=lambda state: state[:60],
)
def test_a_damaged_state_file_is_a_clear_error(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(SpoolError, match=r"state\.json is damaged; move the folder away to start anew"):
        Spool(tmp_path, LIMIT)


def test_what_was_damaged_while_it_waits_is_counted_once_however_often_it_is_looked_for(tmp_path):
    with spool_in(tmp_path) as spool:
        spool.write(batches(b"first", b"second"))
        (path,) = tmp_path.glob("*.spool")
        path.write_bytes(path.read_bytes().replace(b"second", b"sec0nd"))
        assert [spool.after(1) for _ in range(3)] == [None] * 3
        assert spool.lost == [Loss("damaged", 1, Counts(), 0)]
