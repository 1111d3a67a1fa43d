"""Figures that were read off PyTorch 2.14.1, one program at a time (ALLOCATOR.md 12)."""

import pytest

from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator

GIB = 1 << 30
COLUMNS = (
    "requested_bytes.all.current",
    "allocated_bytes.all.current",
    "active_bytes.all.current",
    "reserved_bytes.all.current",
    "inactive_split_bytes.all.current",
    "inactive_split.all.current",
    "segment.all.current",
    "allocation.all.current",
    "num_device_alloc",
    "num_device_free",
)
DEFAULT = """
a=1000      1000      1024      1024  2097152  2096128 1 1 1 1 0
b=3145728   3146728   3146752   3146752 23068672  19921920 2 2 2 2 0
c=9961472  13108200  13108224  13108224 23068672   9960448 2 2 3 2 0
d=31457281 44565481  44566016  44566016 56623104  12057088 3 3 4 3 0
-b         41419753  41420288  41420288 56623104  15202816 4 3 3 3 0
e=2621440  44041193  44566016  44566016 56623104  12057088 3 3 4 3 0
-d         12583912  13108224  13108224 56623104   9960448 2 3 3 3 0
f=31457280 44041192  44565504  44565504 56623104  12057600 3 3 4 3 0
g=1048577  45089769  46662656  46662656 56623104   9960448 2 3 5 3 0
-c         35128297  36701184  36701184 56623104  19921920 2 3 4 3 0
-e         32506857  33555456  33555456 56623104   2096128 1 3 3 3 0
-g         31458280  31458304  31458304 56623104   4193280 2 3 2 3 0
-f             1000      1024      1024 56623104   2096128 1 3 1 3 0
empty          1000      1024      1024  2097152   2096128 1 1 1 3 2
-a                0         0         0  2097152         0 0 1 0 3 2
empty             0         0         0        0         0 0 0 0 3 3
"""
EXPANDABLE_RESERVED = [2097152, 23068672, 23068672] + [65011712] * 10 + [2097152, 2097152, 0]
EXPANDABLE_CALLS = [(1, 0), (2, 0), (2, 0)] + [(3, 0)] * 10 + [(3, 1), (3, 1), (3, 2)]


class Program:
    def __init__(self, conf=""):
        self.simulator = Simulator(parse_settings(conf), Device(24 * GIB))
        self._addresses = {}

    def do(self, what):
        if what == "empty":
            self.simulator.empty_cache()
        elif what.startswith("-"):
            self.simulator.free(self._addresses.pop(what[1:]))
        else:
            name, _, size = what.partition("=")
            self._addresses[name] = self.simulator.malloc(int(size))
        return self.simulator.stats()


STEPS = [line.split() for line in DEFAULT.strip().splitlines()]


def test_the_default_configuration_step_by_step():
    program = Program()
    stats: dict[str, int] = {}
    for what, *figures in STEPS:
        stats = program.do(what)
        assert [stats[column] for column in COLUMNS] == [int(figure) for figure in figures], what
    assert stats["allocation.all.allocated"] == 7
    assert stats["allocated_bytes.all.allocated"] == 81266176
    assert stats["requested_bytes.all.allocated"] == 79692778
    assert stats["reserved_bytes.all.allocated"] == 56623104
    assert stats["allocated_bytes.all.peak"] == 46662656
    assert stats["requested_bytes.all.peak"] == 45089769
    assert stats["inactive_split.all.peak"] == 4
    assert stats["inactive_split_bytes.all.peak"] == 19921920


def test_expandable_segments_reserve_whole_pages_and_waste_none():
    program = Program("expandable_segments:True")
    all_stats = {what: program.do(what) for what in ["a=1000"]}
    stats_by_step = [all_stats["a=1000"], *(program.do(what) for what, *_ in STEPS[1:])]
    assert [stats["reserved_bytes.all.current"] for stats in stats_by_step] == EXPANDABLE_RESERVED
    assert [(stats["num_device_alloc"], stats["num_device_free"]) for stats in stats_by_step] == EXPANDABLE_CALLS
    by_name = {what[0]: stats for (what, *_), stats in zip(STEPS, stats_by_step, strict=True) if "=" in what}
    assert by_name["e"]["allocated_bytes.all.current"] == 44041728
    assert by_name["g"]["allocated_bytes.all.current"] == 45090304
    for stats in stats_by_step:
        assert stats["segment.all.current"] == stats["inactive_split_bytes.all.current"] == 0


def test_a_free_waits_for_the_other_stream_until_the_next_malloc():
    simulator = Simulator(parse_settings(""), Device(24 * GIB))
    for size in (1000, 3145728, 9961472, 2621440):
        simulator.malloc(size)
    simulator.malloc(1048577)
    before = simulator.stats()
    used = simulator.malloc(30 << 20)
    simulator.record_stream(used, 7)
    simulator.free(used)
    simulator.catch_up()
    waiting = simulator.stats()
    assert waiting["allocation.all.current"] == before["allocation.all.current"]
    assert waiting["active.all.current"] == before["active.all.current"] + 1
    assert waiting["active_bytes.all.current"] == before["active_bytes.all.current"] + (30 << 20)
    assert waiting["requested_bytes.all.current"] == before["requested_bytes.all.current"] + (30 << 20)
    simulator.malloc(512)
    after = simulator.stats()
    assert after["active.all.current"] == before["active.all.current"] + 1
    assert after["active_bytes.all.current"] == before["active_bytes.all.current"] + 512


@pytest.mark.parametrize(("version", "keys"), [("2.11.0", 122), ("2.12.1", 123), ("2.13.0", 123), ("2.14.1", 123)])
def test_memory_stats_has_as_many_figures_as_that_version(version, keys):
    simulator = Simulator(parse_settings(""), Device(GIB), version=version)
    assert len(simulator.stats()) == keys
    assert ("num_oom_rejections" in simulator.stats()) is (version >= "2.12")
    simulator.begin_pool((0, 1))
    simulator.malloc(1000)
    private = [key for key in simulator.stats() if key.startswith("reserved_bytes_by_private_pools.0_1.")]
    assert len(private) == (12 if version >= "2.13" else 0)
