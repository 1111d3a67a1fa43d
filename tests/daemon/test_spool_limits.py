"""What a spool gives up: block maps before samples, the oldest first, what is too old; and what it says of it."""

from __future__ import annotations

import os
import shutil
import time

from allocscope.daemon.spool import Spool
from allocscope.daemon.spool_frames import Counts
from allocscope.daemon.spool_segment import Loss, SpooledBatch

DAY_S = 86400.0


def batch(sequence: int) -> SpooledBatch:
    """In the files 500 bytes of samples, and 500 of block maps."""
    return SpooledBatch(sequence, b"s" * 472, Counts(samples=16, block_maps=2), b"m" * 472)


def held(spool: Spool) -> list[tuple[int, bool]]:
    """Numbers, and whether the block maps are there."""
    found, last = [], 0
    while one := spool.after(last):
        found.append((one.sequence, bool(one.block_maps)))
        last = one.sequence
    return found


def test_block_maps_are_read_with_their_batch_and_after_a_restart(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    spool.write([batch(1), SpooledBatch(2, b"no maps", Counts(samples=1)), batch(3)])
    for _ in range(2):
        assert [spool.after(0), spool.after(1), spool.after(2)] == [
            batch(1),
            SpooledBatch(2, b"no maps", Counts(samples=1)),
            batch(3),
        ]
        spool.close()
        spool = Spool(tmp_path, 1 << 20)
    assert spool.lost == []
    spool.close()


def test_a_full_spool_drops_the_oldest_block_maps_and_then_the_oldest_batches_and_says_how_much(tmp_path):
    spool = Spool(tmp_path, 80_000, 10_000)
    for sequence in range(1, 81):
        spool.write([batch(sequence)])
    assert (held(spool), spool.lost) == ([(n, True) for n in range(1, 81)], [])
    for sequence in range(81, 101):
        spool.write([batch(sequence)])
        assert spool.size_bytes <= 80_000
    assert held(spool) == [(n, n > 40) for n in range(1, 101)]
    assert spool.lost == [Loss("spool_full", 0, Counts(block_maps=20), 5_000)] * 4
    for sequence in range(101, 181):
        spool.write([batch(sequence)])
    assert held(spool)[0] == (31, False)
    assert held(spool)[-1] == (180, True)
    assert [loss for loss in spool.lost if loss.batches] == [Loss("spool_full", 10, Counts(samples=160), 5_000)] * 3
    spool.close()


def test_only_what_the_collector_does_not_have_is_lost(tmp_path):
    spool = Spool(tmp_path, 80_000, 10_000)
    for sequence in range(1, 81):
        spool.write([batch(sequence)])
    spool.acknowledge(7)
    spool.write([batch(81)])
    assert spool.lost == [Loss("spool_full", 0, Counts(block_maps=6), 5_000)]
    spool.close()


def test_block_maps_that_were_given_up_are_no_loss_once_more_after_a_restart(tmp_path):
    spool = Spool(tmp_path, 80_000, 10_000)
    for sequence in range(1, 91):
        spool.write([batch(sequence)])
    before = held(spool)
    spool.close()
    spool = Spool(tmp_path, 80_000, 10_000)
    assert (held(spool), spool.lost) == (before, [])
    spool.close()


def test_damaged_block_maps_cost_themselves_only_and_are_told_once(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    spool.write([batch(1), batch(2), batch(3)])
    spool.close()
    (maps,) = tmp_path.glob("*.maps")
    content = bytearray(maps.read_bytes())
    content[700] ^= 1
    maps.write_bytes(content)
    for lost in ([Loss("damaged", 0, Counts(block_maps=1), 0)], []):
        spool = Spool(tmp_path, 1 << 20)
        assert held(spool) == [(1, True), (2, False), (3, True)]
        assert spool.lost == lost
        spool.close()


def test_block_maps_behind_a_damage_stay_with_their_batches(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    spool.write([batch(1), batch(2), batch(3)])
    spool.close()
    (batches,) = tmp_path.glob("*.spool")
    content = bytearray(batches.read_bytes())
    content[700] ^= 1
    batches.write_bytes(content)
    for lost in ([Loss("damaged", 1, Counts(), 500)], []):
        spool = Spool(tmp_path, 1 << 20)
        assert held(spool) == [(1, True), (3, True)]
        assert spool.lost == lost
        spool.close()


def test_block_maps_whose_batch_a_crash_left_unfinished_are_nobodys(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    spool.write([batch(1), batch(2)])
    spool.close()
    (batches,) = tmp_path.glob("*.spool")
    os.truncate(batches, 500)
    spool = Spool(tmp_path, 1 << 20)
    assert (held(spool), spool.lost, spool.size_bytes) == ([(1, True)], [], 1_000)
    spool.write([SpooledBatch(2, b"another", Counts(samples=1))])
    assert held(spool) == [(1, True), (2, False)]
    spool.close()


def test_what_is_too_old_is_dropped_and_the_newest_kept(tmp_path):
    now_s = 0.0
    spool = Spool(tmp_path, 1 << 20, 10_000, limit_age_s=7 * DAY_S, clock=lambda: now_s)
    for day in range(12):
        now_s = day * DAY_S
        spool.write([batch(day + 1)])
    assert [sequence for sequence, _ in held(spool)] == list(range(5, 13))
    assert spool.lost == [Loss("too_old", 1, Counts(16, 2), 1_000)] * 4
    spool.close()


def test_a_clock_that_is_wrong_at_the_start_does_not_empty_the_spool(tmp_path):
    """A machine may begin in 1970, or far ahead, until its clock is set."""
    spool = Spool(tmp_path, 1 << 20, 10_000, limit_age_s=7 * DAY_S)
    spool.write([batch(n) for n in range(1, 30)])
    spool.close()
    for wall_s in (0.0, time.time() + 1000 * DAY_S):
        now_s = 0.0
        spool = Spool(tmp_path, 1 << 20, 10_000, limit_age_s=7 * DAY_S, clock=lambda: now_s, wall=lambda: wall_s)  # noqa: B023
        spool.write([batch(spool.next_sequence)])
        assert (held(spool)[0], spool.lost) == ((1, True), [])
        spool.close()
    now_s = 0.0
    spool = Spool(
        tmp_path, 1 << 20, 10_000, limit_age_s=7 * DAY_S, clock=lambda: now_s, wall=lambda: time.time() + 7 * DAY_S
    )
    now_s = 3700.0
    spool.write([batch(spool.next_sequence)])
    assert [sequence for sequence, _ in held(spool)] == [32]
    spool.close()


def test_a_folder_that_somebody_removes_is_made_anew_and_what_was_in_it_counted(tmp_path):
    spool = Spool(tmp_path / "spool", 1 << 20)
    daemon_id = spool.daemon_id
    spool.write([batch(1), batch(2)])
    shutil.rmtree(tmp_path / "spool")
    spool.write([batch(3)])
    assert held(spool) == [(3, True)]
    assert spool.lost == [Loss("damaged", 1, Counts(), 0)] * 2
    spool.close()
    spool = Spool(tmp_path / "spool", 1 << 20)
    assert (spool.daemon_id, spool.next_sequence, held(spool)) == (daemon_id, 4, [(3, True)])
    spool.close()


def test_a_folder_of_an_older_daemon_is_read_as_it_is(tmp_path):
    """It wrote block maps and the rest into one file, and knew of nothing late."""
    (tmp_path / "state.json").write_text('{"daemon_id": "d", "next_batch": 3, "acknowledged": 1}\n')
    spool = Spool(tmp_path, 1 << 20)
    spool.write([SpooledBatch(3, b"all of it", Counts(samples=5, block_maps=2))])
    assert list(tmp_path.glob("*.maps")) == []
    spool.close()
    spool = Spool(tmp_path, 1 << 20)
    assert spool.daemon_id == "d"
    assert spool.after(0) == SpooledBatch(3, b"all of it", Counts(samples=5, block_maps=2))
    spool.close()
