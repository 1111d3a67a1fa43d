"""The verdict follows from the figures, rounded as they are; what they leave open is not called."""

import pytest

from allocscope.allocator.messages import OomMessage, Origin, Verdict, judge, read_log
from allocscope.allocator.messages.figures import read_figure

NEW = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is free. {who}{allowed}Of"
    " the allocated memory {allocated} is allocated by PyTorch, {private}and {unallocated} is reserved by PyTorch but unallocated."
)
GIVEN = {
    "asked": "2.00 GiB", "total": "79.10 GiB", "free": "100.00 MiB", "who": "", "allowed": "", "allocated": "74.00 GiB",
    "private": "", "unallocated": "4.00 GiB",
}  # fmt: skip
US = "Including non-PyTorch memory, this process has {} memory in use. "


def judged(**given):
    (message,) = read_log([NEW.format(**GIVEN | given)]).messages
    return judge(message)


@pytest.mark.parametrize(
    ("unallocated", "verdict"),
    [
        ("4.00 GiB", Verdict.FRAGMENTATION),
        ("1.92 GiB", Verdict.FRAGMENTATION),
        ("1.91 GiB", Verdict.UNKNOWN),
        ("1.90 GiB", Verdict.UNKNOWN),
        ("1.89 GiB", Verdict.CAPACITY),
        ("10.00 MiB", Verdict.CAPACITY),
    ],
)
def test_fragmentation_and_capacity_are_parted_by_what_was_free_and_ties_are_not_called(unallocated, verdict):
    """100.00 MiB on the device and 1.90 to 1.91 GiB in holes may or may not have been 2.00 GiB."""
    judgement = judged(unallocated=unallocated, allocated="76.00 GiB")
    assert judgement.verdict is verdict
    assert (verdict is Verdict.UNKNOWN) == judgement.reasons[0].startswith("a close call: ")


def test_holes_of_next_to_nothing_are_no_fragmentation():
    judgement = judged(asked="20.00 MiB", free="0 bytes", allocated="78.00 GiB", unallocated="121.23 MiB")
    assert judgement.verdict is Verdict.CAPACITY
    assert "hardly the next" in judgement.reasons[0]


def test_what_private_pools_keep_free_helps_nobody():
    """The text counts it as allocated, though it is free."""
    judgement = judged(private="with 3.00 GiB allocated in private pools (e.g., CUDA Graphs), ", unallocated="1.00 GiB")
    assert judgement.verdict is Verdict.CAPACITY
    assert judgement.reasons[-1] == "3.00 GiB more lay free in private pools (CUDA graphs), of no use to others"


@pytest.mark.parametrize(
    ("who", "verdict"),
    [
        ("Process 7 has 30.00 GiB memory in use. " + US.format("48.00 GiB"), Verdict.OTHER_PROCESSES),
        ("Process 7 has 60.00 MiB memory in use. " + US.format("78.00 GiB"), Verdict.CAPACITY),
        (US.format("48.00 GiB"), Verdict.OTHER_PROCESSES),
        (US.format("78.50 GiB"), Verdict.CAPACITY),
    ],
    ids=["named", "named, but small", "named by nobody", "nobody"],
)
def test_others_are_named_where_their_share_would_have_been_enough(who, verdict):
    allocated = "46.00 GiB" if "48.00" in who else "76.50 GiB"
    assert judged(who=who, allocated=allocated, unallocated="1.00 GiB").verdict is verdict


def test_others_come_first_where_they_hold_far_more_than_the_holes():
    who = "".join(f"Process {pid} has 1.19 GiB memory in use. " for pid in range(101, 116)) + US.format("61.00 GiB")
    judgement = judged(who=who, allocated="58.00 GiB", unallocated="2.50 GiB")
    assert judgement.verdict is Verdict.OTHER_PROCESSES
    assert judgement.reasons == (
        "other processes hold 17.85 GiB of the device, without which it would have fitted",
        "2.50 GiB free in holes would have held the 2.00 GiB too",
    )
    assert judgement.advice[0].startswith("15 processes with the same 1.19 GiB look like other ranks' contexts")


def test_where_the_holes_too_would_have_held_it_their_remedy_stands_beside_that_for_the_others():
    who = "Process 7 has 18.00 GiB memory in use. " + US.format("61.00 GiB")
    judgement = judged(who=who, allocated="58.00 GiB", unallocated="2.50 GiB")
    assert judgement.verdict is Verdict.OTHER_PROCESSES
    assert judgement.advice[:2] == ("see who they are (pid 7)", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    without = judged(
        who="Process 7 has 30.00 GiB memory in use. " + US.format("48.00 GiB"),
        allocated="46.00 GiB",
        unallocated="1.00 GiB",
    )
    assert without.advice == ("see who they are (pid 7)",)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        pytest.param(
            NEW.format(**GIVEN | {"unallocated": "1.90 GiB", "allocated": "76.00 GiB"}),
            "take a snapshot of such a moment: allocscope inspect tells to the byte",
            id="holes and request alike",
        ),
        pytest.param(
            NEW.format(**GIVEN | {"free": "2.03 GiB", "allocated": "5.00 GiB", "unallocated": "1.00 GiB", "total": "9.50 GiB"}),
            "a slightly smaller batch or sequence, so that the device keeps some room: little was lacking",
            id="hardly more free than asked for",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.",
            "find the text where it was first written, whole: the log of the process itself, before it was copied or cut",
            id="cut",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 2.00 GiB",
            "find the text where it was first written, whole: the log of the process itself, before it was copied or cut",
            id="cut early",
        ),
    ],
)  # fmt: skip
def test_what_is_not_called_says_how_to_know_more(text, advice):
    judgement = judge(read_log([text]).messages[0])
    assert (judgement.verdict, judgement.advice) == (Verdict.UNKNOWN, (advice,))


@pytest.mark.parametrize(("free", "than"), [("2.03 GiB", "hardly more than"), ("2.00 GiB", "about as much as")])
def test_a_request_for_about_what_the_device_had_free_is_a_close_call_with_the_device(free, than):
    judgement = judged(free=free, allocated="5.00 GiB", unallocated="1.00 GiB", total="9.50 GiB")
    assert judgement.reasons[0].startswith(f"a close call: the device had {free} free, {than} the 2.00 GiB asked for")


@pytest.mark.parametrize("asked", [None, "2.00 GiB"])
@pytest.mark.parametrize("total", [None, "79.10 GiB"])
@pytest.mark.parametrize("free", [None, "100.00 MiB", "2.01 GiB"])
@pytest.mark.parametrize("unallocated", [None, "1.90 GiB"])
def test_no_verdict_is_unknown_without_advice(asked, total, free, unallocated):
    requested, capacity, left, holes = (
        read_figure(*told.split()) if told else None for told in (asked, total, free, unallocated)
    )
    message = OomMessage(1, Origin.ALLOCATOR, "cuda", requested=requested, total=capacity, free=left, unallocated=holes)
    judgement = judge(message)
    assert judgement.advice


def test_in_a_container_the_named_process_is_this_job_where_there_is_no_room_for_both():
    judgement = judged(who="Process 6513 has 78.90 GiB memory in use. ", unallocated="1.00 GiB")
    assert (judgement.verdict, judgement.own_pid) == (Verdict.CAPACITY, 6513)


def test_beside_a_job_that_is_smaller_the_named_process_is_another():
    judgement = judged(who="Process 6513 has 60.00 GiB memory in use. ", allocated="16.00 GiB", unallocated="1.00 GiB")
    assert (judgement.verdict, judgement.own_pid) == (Verdict.OTHER_PROCESSES, None)


def test_of_several_named_processes_that_fit_none_is_picked():
    who = "Process 1 has 39.00 GiB memory in use. Process 2 has 39.50 GiB memory in use. "
    judgement = judged(who=who, allocated="36.00 GiB", unallocated="1.00 GiB")
    assert (judgement.verdict, judgement.own_pid) == (Verdict.OTHER_PROCESSES, None)
    assert judgement.reasons[-1] == "one of the named processes is this job itself, seen from inside a container"


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        pytest.param({"allocated": "20.00 GiB", "unallocated": "1.00 GiB"}, Verdict.LIMIT, id="over it"),
        pytest.param({"allocated": "19.00 GiB", "unallocated": "1.00 GiB"}, Verdict.LIMIT, id="close, nothing else explains it"),
        pytest.param({"allocated": "9.00 GiB", "unallocated": "1.00 GiB"}, Verdict.NOT_DEVICE_MEMORY, id="far from it"),
        pytest.param(
            {"allocated": "11.00 GiB", "unallocated": "11.00 GiB", "free": "10.00 GiB"}, Verdict.FRAGMENTATION, id="holes within it"
        ),
    ],
)  # fmt: skip
def test_a_limit_is_named_where_it_was_reached(given, verdict):
    assert judged(**{"allowed": "22.00 GiB allowed; ", "free": "55.00 GiB", **given}).verdict is verdict


@pytest.mark.parametrize(
    ("free", "verdict"),
    [
        ("70.00 GiB", Verdict.NOT_DEVICE_MEMORY),
        ("2.01 GiB", Verdict.UNKNOWN),
    ],
)
def test_a_device_with_room_is_not_to_blame(free, verdict):
    judgement = judged(
        free=free, allocated="5.00 GiB", unallocated="1.00 GiB", total="79.10 GiB" if free[0] == "7" else "9.50 GiB"
    )
    assert judgement.verdict is verdict


def test_no_advice_of_a_setting_where_none_would_help():
    judgement = judged(unallocated="10.00 MiB", allocated="78.00 GiB")
    assert "no setting of the allocator would have made room" in judgement.reasons
    assert judgement.advice == (
        "a smaller batch or sequence, activation checkpointing, a sharded optimizer or model, offloading",
    )
