"""What is postponed comes late, whatever happens in between; nothing of it is forgotten, or counted as acknowledged."""

from __future__ import annotations

import json

import pytest

from allocscope.daemon.errors import SpoolError
from allocscope.daemon.spool import Spool
from allocscope.daemon.spool_segment import SpooledBatch
from allocscope.daemon.spool_state import SpoolState


def write(spool: Spool, *sequences: int) -> None:
    spool.write([SpooledBatch(sequence, b"%d" % sequence) for sequence in sequences])


def in_order(spool: Spool) -> list[int]:
    found, last = [], 0
    while batch := spool.after(last):
        found.append(last := batch.sequence)
    return found


def late(spool: Spool) -> list[int]:
    found, last = [], 0
    while batch := spool.late_after(last):
        found.append(last := batch.sequence)
    return found


def test_what_waits_is_late_and_what_is_written_then_is_not(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    write(spool, 1, 2, 3, 4)
    spool.acknowledge(1)
    spool.postpone()
    write(spool, 5, 6)
    assert (in_order(spool), late(spool)) == ([5, 6], [2, 3, 4])
    assert [spool.late_before(sequence) for sequence in (5, 6)] == [3, 0]
    assert (spool.in_order, spool.late, spool.batches) == (2, 3, 5)
    spool.acknowledge(5)
    spool.acknowledge_late(3)
    assert (in_order(spool), late(spool)) == ([6], [4])
    spool.close()


def test_a_collector_that_has_the_newest_does_not_have_what_is_late(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    write(spool, 1, 2, 3)
    spool.postpone()
    write(spool, 4)
    spool._lock.close()  # kill -9
    spool._close_newest()
    spool = Spool(tmp_path, 1 << 20)
    spool.acknowledge(4)
    assert (in_order(spool), late(spool)) == ([], [1, 2, 3])
    spool.acknowledge_late(3)
    assert spool.batches == 0
    spool.close()


def test_twice_postponed_comes_in_its_order(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    write(spool, 1, 2)
    spool.postpone()
    write(spool, 3, 4, 5)
    spool.acknowledge(3)
    spool.postpone()
    write(spool, 6)
    assert (in_order(spool), late(spool)) == ([6], [1, 2, 4, 5])
    assert spool.late_before(6) == 2
    spool.acknowledge_late(4)
    assert late(spool) == [5]
    spool.close()
    spool = Spool(tmp_path, 1 << 20)
    assert (in_order(spool), late(spool)) == ([6], [5])
    spool.close()


def test_a_segment_goes_once_all_of_it_is_acknowledged_late_or_not(tmp_path):
    spool = Spool(tmp_path, 8_000, 1_000)
    for sequence in range(1, 8):
        spool.write([SpooledBatch(sequence, b"x" * 472)])  # two a segment
    spool.postpone()
    spool.write([SpooledBatch(8, b"x" * 472)])
    spool.acknowledge(8)
    assert spool.size_bytes == 4_000
    spool.acknowledge_late(4)
    assert spool.size_bytes == 2_000
    spool.acknowledge_late(7)
    assert spool.size_bytes == 0
    spool.close()


def test_where_it_cannot_be_kept_that_they_are_late_they_are_not(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    spool = Spool(tmp_path, 1 << 20)
    write(spool, 1, 2)
    with monkeypatch.context() as disk:
        disk.setattr("allocscope.daemon.spool.write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            spool.postpone()
    assert (in_order(spool), late(spool)) == ([1, 2], [])
    spool.close()


def test_with_nothing_that_waits_nothing_is_late(tmp_path):
    spool = Spool(tmp_path, 1 << 20)
    write(spool, 1)
    spool.acknowledge(1)
    spool.postpone()
    assert (late(spool), spool.late_before(2)) == ([], 0)
    spool.close()


@pytest.mark.parametrize("told", [[[3, 2]], [[0, 2]], [[2, 9]], [[1, 2], [2, 3]], [[4, 5], [1, 2]], "late", [[1]]])
def test_ranges_that_cannot_be_are_a_damaged_state(tmp_path, told):
    state = {"daemon_id": "d", "next_batch": 7, "acknowledged": 6, "late": told}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(SpoolError, match="is damaged"):
        Spool(tmp_path, 1 << 20)


def test_the_state_comes_back_as_it_was():
    state = SpoolState("d", 20, 18, (range(2, 4), range(7, 8)))
    assert SpoolState.from_json(state.to_json()) == state
    assert SpoolState.from_json('{"daemon_id": "d", "next_batch": 3, "acknowledged": 1}') == SpoolState("d", 3, 1)
