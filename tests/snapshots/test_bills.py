"""The bill of real snapshots, by what was counted independently or proven by calling empty_cache; it always adds up."""

import json
from operator import attrgetter
from pathlib import Path

import pytest

from allocscope.allocator.diagnosis import Moment, diagnose
from allocscope.allocator.snapshot import read_snapshot
from allocscope.model import Line
from tests.snapshots.made import DATA, MIB, MORE, A, block, live, pickled, segment, snapshot


def moments(data: bytes) -> dict[int, Moment]:
    return {device.device: device.now for device in diagnose(read_snapshot(data, "x")).devices}


def indexed() -> list[Path]:
    """Of each folder those that its index.json tells of: `bill` by device, and what was counted in `devices`."""
    folders = [DATA, *([MORE] if MORE else [])]
    return [
        folder / f"{name}.pickle.gz" for folder in folders for name in json.loads((folder / "index.json").read_text())
    ]


@pytest.mark.parametrize("path", indexed(), ids=attrgetter("name"))
def test_a_real_snapshot_is_billed_exactly(path):
    told = json.loads((path.parent / "index.json").read_text())[path.name.removesuffix(".pickle.gz")]
    diagnosis = diagnose(read_snapshot(path.read_bytes(), path.name))
    found = {str(each.device): each.now for each in diagnosis.devices}
    for device, bill in told.get("bill", {}).items():
        lines = {entry.line.value: entry.bytes for entry in found[device].lines}
        assert lines | {"reserved": found[device].reserved_bytes} == bill
    for device, counted in told["devices"].items():
        moment = found[device]
        seen = (len(moment.segments), moment.block_count, moment.reserved_bytes, moment.allocated_bytes)
        assert seen == tuple(counted[key] for key in ("segments", "blocks", "reserved", "allocated"))
        assert moment.largest_free_block_bytes == counted["largest_free_block"]
    assert diagnosis.findings == ()


def expandable(total: int, *blocks: dict, conf: str = "expandable_segments:True", small: bool = False) -> Moment:
    told = segment(A, list(blocks), is_expandable=True, segment_type="small" if small else "large")
    assert told["total_size"] == total
    data = pickled(snapshot(segments=[told], device_traces=[[]], allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": conf}))
    return moments(data)[0]


@pytest.mark.parametrize(
    ("moment", "releasable"),
    [
        pytest.param(expandable(60 * MIB, live(MIB), block(59 * MIB)), 40 * MIB, id="whole pages of 20 MiB"),
        pytest.param(expandable(60 * MIB, live(21 * MIB), block(38 * MIB), live(MIB)), 0, id="no whole page"),
        pytest.param(
            expandable(60 * MIB, live(21 * MIB), block(38 * MIB), live(MIB), conf="large_segment_size_mb:12"),
            24 * MIB,
            id="pages by the settings",
        ),
        pytest.param(
            expandable(36 * MIB, live(MIB), block(35 * MIB)), 0, id="pages of 36 MiB, as the mapped bytes let them be"
        ),
        pytest.param(
            expandable(6 * MIB, live(MIB), block(4 * MIB), live(MIB), small=True), 2 * MIB, id="small pages of 2 MiB"
        ),
    ],
)
def test_of_an_expandable_segment_whole_pages_are_releasable(moment, releasable):
    assert moment.bytes_of(Line.RELEASABLE) == releasable
    assert sum(entry.bytes for entry in moment.lines) == moment.reserved_bytes


def test_by_pool_and_stream_the_parts_add_up_to_the_whole():
    moment = moments(pickled(snapshot()))[0]
    by_group = {(g.pool.value, g.stream, g.private_pool is not None): g.reserved_bytes for g in moment.groups}
    assert by_group == {
        ("small", 0, False): 2 * MIB,
        ("large", 0, False): 40 * MIB,
        ("large", 7, False): 30 * MIB,
        ("large", 0, True): 20 * MIB,
    }
