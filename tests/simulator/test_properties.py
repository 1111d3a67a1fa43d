"""Whatever a program asks, under any settings and version: the books say what the blocks say, and the bill adds up."""

from hypothesis import given, settings

from allocscope.allocator.bill import lines_from_map
from allocscope.allocator.simulator.history import read_history
from allocscope.model import BlockMap, condense
from tests.simulator.programs import MIB, THOROUGHLY, check_blocks, programs, run, stats_of_blocks, step


@given(programs())
@settings(max_examples=60 * THOROUGHLY, deadline=None)
def test_blocks_and_figures_agree_after_each_request(program):
    allocator = program.allocator(trace=True)
    live: list[int] = []
    for request in program.requests:
        address = step(allocator, live, request)
        segments, stats = allocator.segments(), allocator.stats()
        check_blocks(segments, live)
        currents = stats_of_blocks(segments)
        assert {key: stats[key] for key in currents} == currents
        for key, current in currents.items():
            name = key.removesuffix(".current")
            assert stats[f"{name}.allocated"] - stats[f"{name}.freed"] == current
            assert current <= stats[f"{name}.peak"] <= stats[f"{name}.allocated"]
        assert allocator.device.used_bytes == allocator.reserved_bytes == currents["reserved_bytes.all.current"]
        assert allocator.device.free_bytes == program.total_mib * MIB - 7 * MIB - allocator.reserved_bytes
        if address is not None:
            assert allocator.trace[-1].action == "alloc"
            assert allocator.trace[-1].address == address
            assert allocator.trace[-1].stack is None


@given(programs())
@settings(max_examples=60 * THOROUGHLY, deadline=None)
def test_the_bill_adds_up_to_what_is_reserved(program):
    allocator = program.allocator()
    run(allocator, program.requests)
    page = allocator.settings.large_segment_bytes
    groups = condense(allocator.segments(), large_page_bytes=page)
    lines = {entry.line.value: entry.bytes for entry in lines_from_map("p", BlockMap(1, 1, groups))}
    stats = allocator.stats()
    assert sum(lines.values()) == stats["reserved_bytes.all.current"]
    assert lines["requested"] + lines["rounding"] == stats["allocated_bytes.all.current"]
    assert lines["awaiting_free"] == stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    before = allocator.reserved_bytes
    if not lines["awaiting_free"]:
        allocator.empty_cache()
        assert before - allocator.reserved_bytes == lines["releasable"]


@given(programs())
@settings(max_examples=60 * THOROUGHLY, deadline=None)
def test_the_short_way_and_the_long_way_are_one(program):
    """`malloc` serves most requests in one piece, for speed; the same requests go through every rule one by one here."""
    short, long = program.allocator(trace=True), program.allocator(trace=True)
    long._picky = True
    lives: tuple[list[int], list[int]] = ([], [])
    for request in program.requests:
        assert step(short, lives[0], request) == step(long, lives[1], request)
        long._picky = True
    assert short.trace == long.trace
    assert short.stats() == long.stats()
    assert short.segments() == long.segments()


@given(programs(longest=60), programs(longest=60))
@settings(max_examples=40 * THOROUGHLY, deadline=None)
def test_a_copy_goes_on_as_the_first_would_have_and_apart_from_it(program, other):
    first = program.allocator()
    live = run(first, program.requests)
    copy = first.copy(trace=True)
    assert (copy.stats(), copy.segments()) == (first.stats(), first.segments())
    before, before_segments = first.stats(), first.segments()
    copied_live = live.copy()
    addresses = [step(copy, copied_live, request) for request in other.requests]
    assert (first.stats(), first.segments()) == (before, before_segments)
    assert [step(first, live, request) for request in other.requests] == addresses
    assert (copy.stats(), copy.segments()) == (first.stats(), first.segments())


@given(programs())
@settings(max_examples=30 * THOROUGHLY, deadline=None)
def test_reset_figures_begin_anew(program):
    allocator = program.allocator()
    run(allocator, program.requests)
    before = allocator.stats()
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()
    after = allocator.stats()
    for key, figure in after.items():
        if key.endswith(".current") or key == "max_split_size":
            assert figure == before[key]
        elif key.endswith(".peak"):
            assert figure == before[key.replace(".peak", ".current")]
        else:
            assert figure == 0


@given(programs(longest=200))
@settings(max_examples=60 * THOROUGHLY, deadline=None, derandomize=True)
def test_what_a_program_asked_is_read_off_its_history(program):
    """Not always for certain, hence the same programs each time: a free that completes at once may have waited for a flush."""
    allocator = program.allocator(trace=True)
    run(allocator, program.requests)
    found = read_history(
        allocator.trace,
        allocator.settings,
        device_total_bytes=allocator.device.total_bytes,
        other_used=lambda _: 7 * MIB,
        version=program.version,
    )
    assert found.exact
