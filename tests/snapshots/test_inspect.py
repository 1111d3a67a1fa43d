"""`allocscope inspect` as users meet it."""

import gzip
import io
import json
import os
import re
import subprocess
import sys

import pytest

from allocscope.allocator.diagnosis import diagnose
from allocscope.allocator.snapshot import read_snapshot
from allocscope.cli.app import main
from allocscope.cli.inspect_text import Look, as_text, bar_of
from tests.snapshots.made import (
    BILL,
    DATA,
    FRAMES,
    MIB,
    SETTINGS,
    A,
    block,
    entry,
    live,
    pickled,
    segment,
    snapshot,
    waiting,
)


@pytest.fixture
def shown(monkeypatch, tmp_path, capsys):
    """Inspect these bytes; gives the status and what was written."""

    def inspect(data: bytes, *flags: str, name: str = "x.pickle") -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "100")
        path = tmp_path / name
        path.write_bytes(data)
        status = main(["inspect", str(path), *flags])
        return status, *capsys.readouterr()

    return inspect


def test_the_json_has_the_bill_of_each_device(shown):
    status, out, err = shown(pickled(snapshot()), "--json")
    told = json.loads(out)
    assert (status, err) == (0, "")
    assert told["settings"] == SETTINGS
    assert told["findings"] == []
    device = told["devices"]["0"]
    assert device["bill"] == BILL
    assert (device["segments"], device["blocks"], device["largest_free_block_bytes"]) == (5, 10, 20 * MIB)
    assert device["oom"] == []
    assert device["headroom"]["request_bytes"] == 20 * MIB
    assert device["headroom"]["device_free_bytes"] is None
    assert sum(pool["bill"]["reserved"] for pool in device["pools"]) == 92 * MIB
    hole = device["holes"][0]
    assert (hole["bytes"], hole["pinned_by_count"], hole["pinned_by_bytes"]) == (14 * MIB, 3, 6 * MIB)
    assert hole["pinned_by"][2]["where"] == "forward model.py:12 ← step train.py:40"
    assert device["sites"][1] == {"where": "forward model.py:12 ← step train.py:40", "bytes": 3 * MIB, "count": 1}


def test_what_is_not_known_is_null_in_json(shown):
    _, out, _ = shown(pickled([{"total_size": 512, "blocks": [{"size": 512, "state": "active_allocated"}]}]), "--json")
    told = json.loads(out)
    assert told["settings"] is None
    assert told["devices"]["0"]["bill"]["requested"] is None
    assert told["devices"]["0"]["allocated_bytes"] == 512


@pytest.mark.parametrize("name", ["x.json", "x.pickle.gz", "x"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_files_name_says_nothing_about_its_form(shown, name, packed):
    data = gzip.compress(pickled(snapshot())) if packed else pickled(snapshot())
    assert json.loads(shown(data, "--json", name=name)[1])["devices"]["0"]["bill"] == BILL


def test_the_headroom_counts_what_the_device_is_said_to_have_free(shown):
    _, out, _ = shown(pickled(snapshot()), "--json", "--device-free", str(100 * MIB))
    headroom = json.loads(out)["devices"]["0"]["headroom"]
    assert (headroom["request_bytes"], headroom["way"]) == (120 * MIB, "after_release")


FAILED = {
    "segments": [],
    "device_traces": [
        [
            entry("alloc", A + 8 * MIB, 4 * MIB, frames=FRAMES),
            {"action": "oom", "device_free": 3 * MIB, "size": 17 * MIB, "stream": 0, "time_us": 1_700_000_000_000_000},
            entry("free_requested", A + 8 * MIB, 4 * MIB),
            entry("free_completed", A + 8 * MIB, 4 * MIB),
            entry("segment_free", A, 20 * MIB),
        ]
    ],
}


def test_a_failure_is_told_with_the_bill_of_its_moment(shown):
    (oom,) = json.loads(shown(pickled(FAILED), "--json")[1])["devices"]["0"]["oom"]
    assert (oom["entry"], oom["requested_bytes"], oom["segment_bytes"]) == (1, 17 * MIB, 18 * MIB)
    assert (oom["device_free_bytes"], oom["verdict"]) == (3 * MIB, "fragmentation")
    assert oom["bill"] == {
        "requested": 4 * MIB,
        "rounding": 0,
        "awaiting_free": 0,
        "stranded": 16 * MIB,
        "releasable": 0,
        "private": 0,
        "reserved": 20 * MIB,
    }


def captured(wanted: object, free: object = 3 * MIB, **more: object) -> bytes:
    """A capture at an OutOfMemoryError of a program that records no history; 16 MiB in two holes are free."""
    held = segment(A, [block(8 * MIB), live(4 * MIB), block(8 * MIB)])
    told = {"device": 0, "requested_bytes": wanted, "device_free_bytes": free}
    ours = {"reason": "oom", "time_us": 1_700_000_000_000_000, "oom": told | more}
    return pickled(snapshot(segments=[held], device_traces=[], allocscope=ours))


def test_a_capture_at_a_failure_tells_of_it_without_a_history(shown):
    status, out, err = shown(captured(18 * MIB))
    assert (status, err) == (0, "")
    assert (
        "OutOfMemoryError at 2023-11-14 22:13:20 UTC: a segment of 18.00 MiB wanted of the device: fragmentation\n"
        "  16.00 MiB was free inside the allocator and 3.00 MiB on the device: together 19.00 MiB, enough for 18.00 MiB\n"
        "\n"
        "where the bytes are\n"
    ) in out
    assert "with 3.00 MiB free on the device" in out
    (oom,) = json.loads(shown(captured(18 * MIB), "--json")[1])["devices"]["0"]["oom"]
    assert (oom["entry"], oom["requested_bytes"], oom["segment_bytes"]) == (None, None, 18 * MIB)
    assert (oom["device_free_bytes"], oom["verdict"], oom["bill"]["stranded"]) == (3 * MIB, "fragmentation", 16 * MIB)


@pytest.mark.parametrize(
    ("wanted", "free", "verdict"),
    [
        (18 * MIB, 20 * MIB, "limit"),
        (40 * MIB, 3 * MIB, "capacity"),
        (20 * MIB, 3 * MIB, "unknown"),  # a request of 5 MiB wants such a segment, and so does one of 20 MiB
        (40 * MIB, None, "unknown"),
    ],
)
def test_a_failure_of_which_only_the_segment_is_known_is_judged_by_that(shown, wanted, free, verdict):
    (oom,) = json.loads(shown(captured(wanted, free), "--json")[1])["devices"]["0"]["oom"]
    assert oom["verdict"] == verdict


@pytest.mark.parametrize("wanted", [None, "much", -1, True, 1.5])
def test_what_a_capture_says_amiss_of_a_failure_is_no_failure(shown, wanted):
    assert json.loads(shown(captured(wanted), "--json")[1])["devices"]["0"]["oom"] == []


def test_a_failure_of_another_device_is_not_this_ones(shown):
    assert json.loads(shown(captured(18 * MIB, device=1), "--json")[1])["devices"]["0"]["oom"] == []


TEXT_OF_FAILED = """\
device 0  0 bytes reserved in 0 segments, 0 blocks, 0 bytes live

OutOfMemoryError at 2023-11-14 22:13:20 UTC (entry 1 of 5): 17.00 MiB asked for, a segment of 18.00 MiB wanted of the device: fragmentation
  16.00 MiB was free inside the allocator and 3.00 MiB on the device: together 19.00 MiB, enough for 17.00 MiB
  of its own pool and stream 16.00 MiB was free, the largest piece 8.00 MiB
What follows shows the moment of the last one; since then 4.00 MiB net of it was freed. --now shows the snapshot.

where the bytes are, at that moment
  requested          4.00 MiB  20.0 %  ██████                        live, as asked for
  rounding            0 bytes   0.0 %                                live, beyond what was asked for
  awaiting_free       0 bytes   0.0 %                                freed, waiting for another stream
  stranded          16.00 MiB  80.0 %  ███████████████████████       free, in holes that cannot be given back
  releasable          0 bytes   0.0 %                                free, empty_cache would give it back
  private             0 bytes   0.0 %                                free, kept by private pools
  reserved          20.00 MiB

by pool and stream
   pool  stream  private  segments   reserved      live  waiting   stranded  releasable  largest free
  large       0                  1  20.00 MiB  4.00 MiB  0 bytes  16.00 MiB     0 bytes      8.00 MiB

the worst of 1 segments with holes (█ live  ▓▒░ partly  · free  ~ waiting)
   20.00 MiB large  16.00 MiB free ··························▒████████████▒··························

the largest holes, and what pins them
  8.00 MiB at 0x7f0000000000 in a segment of 20.00 MiB (large pool, stream 0), pinned by 1 block of 4.00 MiB
        4.00 MiB  forward model.py:12 ← step train.py:40
  8.00 MiB at 0x7f0000c00000 in a segment of 20.00 MiB (large pool, stream 0), pinned by 1 block of 4.00 MiB
        4.00 MiB  forward model.py:12 ← step train.py:40

who holds the live bytes
      4.00 MiB      1 ×  forward model.py:12 ← step train.py:40

the largest request that would succeed at the snapshot, with what was freed since the OutOfMemoryError: 22.00 MiB, from the device
  with 23.00 MiB free on the device
"""


def test_for_people_the_failure_is_explained_and_its_moment_drawn(shown):
    status, out, _ = shown(pickled(FAILED))
    assert status == 0
    assert out == TEXT_OF_FAILED


HOLED = {"segments": [segment(A, [live(8 * MIB), block(8 * MIB), live(MIB), block(3 * MIB)])], "device_traces": []}
HEALTHY = {"segments": [segment(A, [live(20 * MIB)]), segment(A + 32 * MIB, [block(20 * MIB)])], "device_traces": []}
HISTORY = {"device_traces": [[entry("alloc", A, 8 * MIB)]]}


def test_without_a_failure_two_sentences_say_what_it_comes_to(shown):
    out = shown(pickled(HEALTHY))[1]
    assert out.split("\n\n")[1] == (
        "20.00 MiB of 40.00 MiB reserved are live; 20.00 MiB are free, and empty_cache would give them back.\n"
        "A healthy cache: little is stranded (0.0 %)."
    )


def test_where_much_is_stranded_the_largest_hole_is_told(shown):
    out = shown(pickled(HOLED))[1]
    assert out.split("\n\n")[1] == (
        "9.00 MiB of 20.00 MiB reserved are live; 11.00 MiB lie stranded in 2 holes.\n"
        "Much is stranded, 55.0 % of what is reserved: no hole can serve a request larger than 8.00 MiB."
    )


def test_another_setting_is_offered_where_there_is_a_history_to_replay(shown, tmp_path):
    out = shown(pickled(HOLED | HISTORY), name="my snapshot")[1]
    assert f"\n  allocscope replay '{tmp_path / 'my snapshot'}' --conf expandable_segments:True" in out
    assert "allocscope replay" not in shown(pickled(HEALTHY | HISTORY))[1]
    assert "allocscope replay" not in shown(pickled(HOLED))[1]


def test_the_devices_that_failed_come_first(shown):
    two = FAILED | {"segments": [segment(A, [live(20 * MIB)])], "device_traces": [[], FAILED["device_traces"][0]]}
    out = shown(pickled(two))[1]
    assert 0 <= out.index("device 1") < out.index("OutOfMemoryError") < out.index("device 0")
    assert list(json.loads(shown(pickled(two), "--json")[1])["devices"]) == ["0", "1"]


def test_that_places_are_not_recorded_is_told_once_with_how_to_record_them(shown):
    out = shown(pickled(HOLED))[1]
    assert out.count("not recorded") == 1
    assert "torch.cuda.memory._record_memory_history(), called before the job allocates, records it." in out
    assert "not recorded" not in shown(pickled(FAILED))[1]


def test_sentences_are_folded_for_a_terminal_only(shown):
    folded = text_of(pickled(FAILED), Look(width=60, prose_width=60, colour=True))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", folded)
    assert "  16.00 MiB was free inside the allocator and 3.00 MiB on\n    the device: together" in plain
    prose = [
        line for line in plain.splitlines() if "█" not in line and not re.search(r" {5}|(large|large free)  ", line)
    ]
    assert max(map(len, prose)) <= 60
    assert shown(pickled(FAILED))[1] == TEXT_OF_FAILED


def test_a_command_to_be_copied_is_not_folded():
    assert "\n  allocscope replay FILE --conf expandable_segments:True\n" in text_of(
        pickled(HOLED | HISTORY), Look(prose_width=30)
    )


def test_now_shows_the_snapshot_and_not_the_failure(shown):
    out = shown(pickled(FAILED), "--now")[1]
    assert "nothing is reserved" in out
    assert "at that moment" not in out


@pytest.mark.parametrize(
    ("blocks", "bar"),
    [
        ([live(20 * MIB)], "██████████"),
        ([block(20 * MIB)], "··········"),
        ([live(10 * MIB), block(10 * MIB)], "█████·····"),
        ([live(MIB), block(18 * MIB), live(MIB)], "▒········▒"),
        ([live(20 * MIB - 512), block(512)], "█████████▓"),
        ([block(20 * MIB - 512), live(512)], "·········░"),
        ([waiting(6 * MIB), live(14 * MIB)], "~~~███████"),
    ],
)
def test_a_bar_shows_every_hole(blocks, bar):
    read = read_snapshot(pickled([segment(A, blocks)]), "x")
    assert bar_of(read.segments[0], 10, Look().shades) == bar


def text_of(data: bytes, look: Look) -> str:
    read = read_snapshot(data, "x", tolerant=True)
    return as_text(diagnose(read), read, look)


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.pickle*")))
@pytest.mark.parametrize("width", [60, 100, 200])
def test_bars_are_as_wide_as_the_terminal(name, width):
    text = text_of((DATA / name).read_bytes(), Look(width=width))
    bars = [line for line in text.splitlines() if " free " in line and set(line[-5:]) <= set("·░▒▓█~")]
    assert all(len(line) <= width + 1 for line in bars)


def test_a_terminal_that_knows_only_ascii_gets_ascii():
    named = [{"name": "schöner", "filename": "größe.py", "line": 1}]
    told = snapshot(segments=[segment(A, [live(MIB, frames=named), block(MIB)])])
    text = text_of(pickled(told), Look(ascii_only=True))
    assert text.isascii()
    assert "#" in text
    assert "sch?ner gr??e.py:1" in text


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(pickled(snapshot()))
    code = "import sys; from allocscope.cli.app import main; sys.exit(main(['inspect', sys.argv[1]]))"
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, "-c", code, path], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_colours_are_for_terminals_only():
    assert "\x1b[" not in text_of(pickled(FAILED), Look())
    assert "\x1b[31;1m" in text_of(pickled(FAILED), Look(colour=True))


def test_what_a_file_says_cannot_steer_the_terminal():
    evil = [{"name": "\x1b[2Jx", "filename": "a\x07.py", "line": 1}]
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "a:\x1b]0;b"}
    text = text_of(
        pickled(snapshot(segments=[segment(A, [live(MIB, frames=evil), block(MIB)])], allocator_settings=conf)), Look()
    )
    assert "?[2Jx a?.py:1" in text
    assert "\x1b" not in text


def test_output_that_cannot_hold_what_is_drawn_gets_what_it_can(monkeypatch, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(pickled(FAILED))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["inspect", str(path)]) == 0
    out.flush()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"no snapshot", "is not a pickle"),
        (gzip.compress(pickled(snapshot()), mtime=0)[:-20], "cut off: its gzip ends in the middle"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_one_line(shown, data, message):
    status, out, err = shown(data)
    assert (status, out) == (2, "")
    assert err.startswith("allocscope inspect: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there_is_told(capsys, tmp_path):
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2
    assert "cannot be read (Is a directory)" in capsys.readouterr().err
