"""Histories that are damaged, cut, foreign or of a PyTorch that is not known are replayed as far as it goes, and told as what they are."""

import json
import pickle
import random
from dataclasses import replace

import pytest

from allocscope.allocator.errors import SettingsError
from allocscope.allocator.recording import read_recording
from allocscope.allocator.settings import KEYS, AllocatorSettings, parse_settings, parse_settings_to_try
from allocscope.allocator.simulator.sources import source_of, sources_of
from allocscope.allocator.simulator.what_if import Source, what_if
from allocscope.allocator.snapshot import Snapshot, SnapshotBlock, SnapshotSegment
from allocscope.cli.replay import main as replay
from tests.allocator.made import SHIPPED, alloc, as_pytorch_writes, freed, gave_back, got, oom

MIB = 1 << 20
A = 1 << 30
KNOWN = [got(A, 40 * MIB), alloc(A, 40 * MIB), *(entry._replace(size=40 * MIB) for entry in freed(A))]


def made(entries, **more):
    return Source(tuple(entries), (), AllocatorSettings(), "", 80 * MIB, **more)


@pytest.fixture(scope="module")
def run():
    """A whole run that died, and a part of it that is quick to replay: its last few thousand entries."""
    return source_of(read_recording(SHIPPED / "varlen-1-2985.run.json"))


@pytest.fixture(scope="module")
def other_run():
    return source_of(read_recording(SHIPPED / "kv_serve-1-4114.run.json"))


def last(source, entries):
    return replace(source, trace=source.trace[-entries:])


def test_a_history_without_its_beginning_is_explained_and_what_it_says_of_others_is_an_estimate(run):
    """As of a ring that wrapped: the first entries of it are lost."""
    found = what_if(last(run, 5000), ["expandable_segments:True"])
    assert found.history.exact
    assert found.history.entries == 5000
    assert not found.exactness.exact
    assert "the history begins in the middle of the run" in found.exactness.words()
    assert found.exactness.words().startswith("an estimate: 5,000 of 5,000 entries are explained to the byte; ")


def test_a_ring_that_wrapped_in_the_middle_of_a_flush_is_explained(run):
    """The entries of an allocation that flushed, each of them the first that is left."""
    failed = next(at for at, entry in enumerate(run.trace) if entry.action == "oom")
    releases = [at for at in range(failed - 40, failed) if run.trace[at].action == "segment_free"]
    assert releases
    for at in (releases[0], releases[-1], failed):
        found = what_if(replace(run, trace=run.trace[at:]), [])
        assert found.history.exact
        assert found.history.entries == len(run.trace) - at


def test_segments_of_something_else_are_told(run, other_run):
    """A whole history needs none; one that begins in the middle is lost without its own."""
    short = replace(run, trace=run.trace[:4000], segments=other_run.segments)
    found = what_if(short, [])
    assert found.history.exact
    assert found.history.contradictions > 0
    assert "the history does not lead to the snapshot's segments" in found.exactness.words()
    middle = what_if(replace(last(run, 4000), segments=other_run.segments), [])
    assert not middle.history.exact
    assert not middle.exactness.exact


def test_blocks_where_a_foreign_snapshot_leaves_no_room_for_them_are_told():
    """What the history frees first lies inside a block that the snapshot says is live."""
    blocks = (
        SnapshotBlock(A, 38 * MIB, 38 * MIB, "active_allocated"),
        SnapshotBlock(A + 38 * MIB, 2 * MIB, 0, "inactive"),
    )
    foreign = SnapshotSegment(0, A, 40 * MIB, 0, "large", (0, 0), is_expandable=False, blocks=blocks)
    inside = [entry._replace(size=2 * MIB) for entry in freed(A + 20 * MIB)]
    found = what_if(replace(made(inside), segments=(foreign,)), ["expandable_segments:True"])
    assert (found.history.contradictions, found.exactness.exact) == (1, False)
    assert len(found.outcomes) == 2


@pytest.mark.parametrize("conf", ["", "max_split_size_mb:64", "expandable_segments:True"])
@pytest.mark.parametrize("seed", range(10))
def test_a_piece_of_a_history_with_the_snapshot_of_its_end_is_told(run, conf, seed):
    """What it leads back to may lie in itself."""
    drawn = random.Random(seed)
    start = drawn.randrange(len(run.trace) - 400)
    piece = run.trace[start : start + drawn.randrange(50, 400)]
    found = what_if(replace(run, trace=piece, conf=conf, settings=parse_settings(conf)), [])
    assert found.history.entries == len([entry for entry in piece if entry.action != "snapshot"])
    assert not found.exactness.exact


def test_segments_and_blocks_that_lie_in_others_are_told():
    """The history gives back a segment inside one that there is, whose block is longer than itself."""
    block = SnapshotBlock(A, 60 * MIB, 60 * MIB, "active_allocated")
    odd = SnapshotSegment(0, A, 40 * MIB, 0, "large", (0, 0), is_expandable=False, blocks=(block,))
    other = replace(odd, address=2 * A, total_size=2 * MIB, blocks=())
    entries = [got(2 * A, 2 * MIB), gave_back(A + 20 * MIB, 20 * MIB)]
    settings = parse_settings("max_split_size_mb:64")
    found = what_if(replace(made(entries), segments=(odd, other), settings=settings), ["expandable_segments:True"])
    assert (found.history.contradictions, found.exactness.exact) == (2, False)


def test_a_history_that_is_cut_off_is_told(run):
    found = what_if(replace(run, trace=run.trace[:4000]), [])
    assert not found.exactness.exact


def test_entries_out_of_order_are_explained_up_to_where_they_are(run):
    entries = list(run.trace[:2000])
    random.Random(0).shuffle(entries)
    found = what_if(replace(run, trace=tuple(entries), segments=()), ["expandable_segments:True"])
    assert found.history.explained < 20
    assert "the history is explained up to entry" in found.exactness.words()


def test_two_devices_of_one_snapshot_are_replayed_each_with_its_own(run, other_run):
    one, two = last(run, 3000), last(other_run, 3000)
    segments = (*one.segments, *(replace(segment, device=1) for segment in two.segments))
    devices = ({"index": 1, "total_bytes": two.device_total_bytes}, {"index": 0, "total_bytes": one.device_total_bytes})
    snapshot = Snapshot(
        segments,
        (one.trace, two.trace),
        AllocatorSettings(),
        "",
        capture={"process": {"torch_version": "2.14.1+cu130", "devices": devices}},
    )
    found = {index: what_if(source, []) for index, source in sources_of(snapshot).items()}
    assert [each.device_total_bytes for each in found.values()] == [one.device_total_bytes, two.device_total_bytes]
    assert [each.history.exact for each in found.values()] == [True, True]
    assert [each.history.entries for each in found.values()] == [3000, 3000]
    assert [each.total_is_shown for each in found.values()] == [False, False]


def test_a_capture_tells_the_memory_fraction_that_a_program_set():
    """Half of 80 MiB: of the second segment there would be room on the device, and it may not be had."""
    entries = [*KNOWN[:2], oom(20 * MIB, 40 * MIB)]
    device = {"index": 0, "total_bytes": 80 * MIB, "memory_fraction": 0.5}
    snapshot = Snapshot((), (tuple(entries),), AllocatorSettings(), "", capture={"process": {"devices": (device,)}})
    found = what_if(sources_of(snapshot)[0], [])
    assert list(found.exactness.differences()) == []
    assert "40.00 MiB allowed" in (found.outcomes[0][1].message or "")
    without = what_if(replace(sources_of(snapshot)[0], memory_fraction=None), [])
    assert without.exactness.exact is False


@pytest.mark.parametrize(
    "process",
    [
        None,
        [],
        {"devices": 5, "torch_version": 7},
        {"devices": [None, {"index": 0, "total_bytes": -5, "memory_fraction": "half"}], "torch_version": "nightly"},
    ],
)
def test_what_a_capture_tells_wrongly_is_passed_over(process):
    snapshot = Snapshot((), (tuple(KNOWN),), AllocatorSettings(), "", capture={"process": process})
    source = sources_of(snapshot)[0]
    assert (source.device_total_bytes, source.memory_fraction, source.version) == (None, None, None)
    assert what_if(source, []).history.exact


def test_a_pytorch_whose_rules_are_not_known_is_replayed_by_the_nearest_and_marked():
    found = what_if(made(KNOWN, version="2.9.1+cu128"), [])
    assert found.history.exact
    assert not found.exactness.exact
    assert found.exactness.words() == (
        "an estimate: 4 of 4 entries are explained to the byte;"
        " the rules of the PyTorch that recorded it are not known here: these are the nearest"
    )
    assert what_if(made(KNOWN, version="2.12.1"), []).exactness.exact


def test_a_device_smaller_than_what_was_reserved_on_it_is_another_device():
    found = what_if(made(KNOWN, version=None), [], version="2.14.1")
    assert found.outcomes[0][1].failed_at is None
    small = what_if(replace(made(KNOWN), device_total_bytes=30 * MIB), [])
    assert small.history.exact
    assert small.outcomes[0][1].failed_at == 0
    assert "bytes reserved at most: 41,943,040 then, 0 in the replay" in small.exactness.words()


def test_numbers_that_no_allocator_has_end_in_words_and_not_in_a_traceback(tmp_path, capsys):
    entries = [*KNOWN, alloc(A, (1 << 63) + 5, time_us=(1 << 64) - 1), oom((1 << 63) + 5, -7)]
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [as_pytorch_writes(entries)]}))
    assert replay([str(path), "--conf", "expandable_segments:True", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert found["explained"] == 4
    assert found["estimates"] is True


def test_keys_that_its_pytorch_does_not_have_are_told(tmp_path, capsys):
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [as_pytorch_writes(KNOWN)]}))
    confs = ["--conf", "large_segment_size_mb:64", "--conf", "roundup_power2_divisions:8"]
    assert replay([str(path), "--torch", "2.6.0", *confs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert [each["hazards"] for each in found["replays"]] == [
        [],
        [
            (
                "large_segment_size_mb: PyTorch 2.6 is not known to have it, and does not start with a key that it does not have;"
                " 2.11 has it"
            )
        ],
        [],
    ]


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_key_with_a_letter_too_few_is_refused_with_the_right_one(key):
    wrong = key[:3] + key[4:]
    with pytest.raises(SettingsError, match=rf"PyTorch has no {wrong} \(did you mean {key}\?\)"):
        parse_settings_to_try(f"{wrong}:1")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--memory-fraction", "1.5"], "'1.5' is not a share of the device from 0 to 1, such as 0.8"),
        (["--memory-fraction", "nan"], "'nan' is not a share of the device"),
        (["--processes", "0"], "'0' is not a number of processes from 1 to 256"),
        (["--device-other", "-5"], "is not a number of bytes"),
    ],
)
def test_options_out_of_range_are_refused(capsys, arguments, problem):
    with pytest.raises(SystemExit) as ended:
        replay(["x", "=".join(arguments)])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
