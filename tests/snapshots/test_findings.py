"""What does not add up in a snapshot is a finding, never an exception, and the bill adds up nevertheless."""

import copy

import pytest

from allocscope.allocator.diagnosis import diagnose
from allocscope.allocator.snapshot import read_snapshot
from tests.snapshots.made import MIB, SEGMENTS, A, block, live, pickled, segment


def changed(index: int, **keys) -> list[dict]:
    segments = copy.deepcopy(SEGMENTS)
    segments[index].update(keys)
    return segments


def with_block(index: int, which: int, **keys) -> list[dict]:
    segments = copy.deepcopy(SEGMENTS)
    segments[index]["blocks"][which].update(keys)
    return segments


@pytest.mark.parametrize(
    ("segments", "kinds", "reserved"),
    [
        pytest.param(SEGMENTS, [], 92 * MIB, id="sound"),
        pytest.param(changed(1, total_size=21 * MIB), ["not_filled"], 93 * MIB, id="more than its blocks"),
        pytest.param(changed(1, total_size=19 * MIB), ["not_filled", "outside"], 92 * MIB, id="less than its blocks"),
        pytest.param(
            changed(2, blocks=[], allocated_size=3 * MIB, active_size=4 * MIB),
            ["not_filled", "sums", "sums"],
            92 * MIB,
            id="sums without blocks",
        ),
        pytest.param(with_block(1, 1, address=A + 34 * MIB), ["overlap"], 92 * MIB, id="blocks overlap"),
        pytest.param(with_block(1, 1, address=A + 31 * MIB), ["disorder"], 92 * MIB, id="blocks out of order"),
        pytest.param(changed(3, allocated_size=1), ["sums"], 92 * MIB, id="a sum that disagrees"),
        pytest.param(with_block(3, 0, state="frozen"), ["sums", "state"], 92 * MIB, id="an unknown state"),
        pytest.param(changed(3, segment_type="huge"), ["type"], 92 * MIB, id="an unknown type"),
        pytest.param(
            with_block(0, 0, requested_size=513), ["sums", "requested"], 92 * MIB, id="asked for more than it has"
        ),
        pytest.param(
            changed(3, address=A + 65 * MIB), ["outside", "segments_overlap"], 92 * MIB, id="segments overlap"
        ),
        pytest.param(
            changed(2, is_expandable=True, total_size=30 * MIB), ["not_filled", "page"], 102 * MIB, id="no page"
        ),
    ],
)
def test_what_does_not_add_up_is_told(segments, kinds, reserved):
    diagnosis = diagnose(read_snapshot(pickled(segments), "x"))
    assert [finding.kind for finding in diagnosis.findings] == kinds
    now = diagnosis.devices[0].now
    assert now.reserved_bytes == reserved
    assert all(entry.bytes >= 0 for entry in now.lines)


def test_a_segment_without_blocks_is_billed_by_its_sums():
    told = segment(A, [block(20 * MIB)]) | {"blocks": [], "allocated_size": 5 * MIB, "active_size": 6 * MIB}
    lines = diagnose(read_snapshot(pickled([told]), "x")).devices[0].now.lines
    assert {entry.line.value: entry.bytes for entry in lines} == {
        "requested": 5 * MIB,
        "rounding": 0,
        "awaiting_free": MIB,
        "stranded": 14 * MIB,
        "releasable": 0,
        "private": 0,
    }


def test_the_same_finding_of_many_segments_is_told_in_bounds():
    many = [segment(A + k * 32 * MIB, [live(20 * MIB)]) | {"allocated_size": 1} for k in range(200)]
    findings = diagnose(read_snapshot(pickled(many), "x")).findings
    assert len(findings) == 51
    assert findings[-1].text == "150 more segments have the same"
