"""What is advised for jobs that fragment, leak, want too much, are crowded out, or do well."""

import pytest

from allocscope.allocator.advice import Attempt, Circumstances, advise, one_by_one, outcome_of
from allocscope.allocator.settings import parse_settings
from allocscope.model import AdviceKind
from tests.advice.made import MIB, Job, fragmented, leaking, steady

EXPANDABLE = "expandable_segments:True"
SAFE = Circumstances("2.14.1", uses_private_pools=False, uses_ipc=False, has_virtual_memory=True, has_nvml=True)


def trial_of(advice, conf, change=None):
    return next(each for each in advice.trials if (each.conf, each.change) == (conf, change))


def test_a_job_that_died_of_holes_is_told_the_settings_that_serve_all_it_asked_for():
    job = fragmented(total_mib=900)
    advice = advise(job.source(), circumstances=SAFE)
    assert job.dead
    assert (advice.kind, advice.conf, advice.change) == (AdviceKind.SETTING, EXPANDABLE, None)
    assert advice.is_exact
    assert advice.trials[0].conf == ""
    assert advice.trials[0].failed_at is not None
    assert trial_of(advice, EXPANDABLE).failed_at is None
    assert advice.summary.startswith(
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the recorded requests then need "
    )
    assert advice.gains[0].startswith("every recorded request is served; as it was set request ")


def test_what_is_measured_is_the_least_room_that_serves():
    """To a hundredth of the room: in what it says all is served, in two hundredths less something fails."""
    advice = advise(fragmented(total_mib=900).source())
    best = trial_of(advice, EXPANDABLE)
    assert best.needed_bytes is not None
    made = []

    def replays(script):
        made.append(script)
        return one_by_one(script)

    advise(fragmented(total_mib=900).source(), replays=replays)
    enough = outcome_of(made[0], Attempt(EXPANDABLE, room_bytes=best.needed_bytes))
    too_little = outcome_of(made[0], Attempt(EXPANDABLE, room_bytes=best.needed_bytes - 18 * MIB))
    assert enough is not None
    assert enough.failed_at is None
    assert too_little is not None
    assert too_little.failed_at is not None


@pytest.mark.parametrize(
    ("circumstances", "why"),
    [
        (Circumstances("2.14.1", uses_ipc=True), "CUDA IPC"),
        (Circumstances("2.14.1", has_virtual_memory=False), "without virtual memory"),
        (Circumstances("2.13.0", has_nvml=False), "libnvidia-ml.so.1"),
        (Circumstances("2.14.1", uses_private_pools=True), "MemPools"),
    ],
    ids=["IPC", "vGPU", "no NVML", "private pools"],
)
def test_a_hazard_blocks_what_would_help_most_and_says_so(circumstances, why):
    advice = advise(fragmented(total_mib=900).source(), circumstances=circumstances)
    blocked = trial_of(advice, EXPANDABLE)
    assert blocked.failed_at is None
    assert why in (blocked.blocked or "")
    assert EXPANDABLE not in (advice.conf or "")
    assert any(EXPANDABLE in each and why in each for each in advice.hazards)


def test_private_pools_are_seen_in_the_history():
    job = Job(900)
    job.malloc("of a pool", 4, pool=(0, 1))
    job.malloc("too large", 2000)
    advice = advise(job.source())
    assert "MemPools" in (trial_of(advice, EXPANDABLE).blocked or "")


def test_what_cannot_be_ruled_out_is_told_beside_the_advice():
    known = advise(fragmented(total_mib=900).source(), circumstances=SAFE).hazards
    unknown = advise(fragmented(total_mib=900).source()).hazards
    assert not any("is not known" in each and "CUDA IPC" in each for each in known)
    assert any("is not known" in each and "CUDA IPC" in each for each in unknown)


def test_a_job_that_wants_more_than_there_is_is_told_that_nothing_helps():
    job = Job(500)
    job.malloc("weights", 300)
    job.malloc("batch", 250)
    advice = advise(job.source())
    assert (advice.kind, advice.conf, advice.change) == (AdviceKind.NOTHING, None, None)
    assert advice.summary == (
        "Nothing that was tried helps: at its highest 550.00 MiB is live or asked for, and 500.00 MiB was there, "
        "too little even without any holes."
    )
    assert all(each.failed_at is not None for each in advice.trials)


def test_a_job_that_others_crowded_out_is_told_of_them():
    job = Job(500, others={0: 50, 5000: 300})
    for step in range(10):
        job.malloc(f"batch {step}", 40)
    advice = advise(job.source())
    assert advice.kind is AdviceKind.NOTHING
    assert "others on the device took 250.00 MiB more during the recording" in advice.summary


def test_a_leak_is_told_beside_the_settings_that_only_delay_its_end():
    advice = advise(leaking().source())
    assert (advice.kind, advice.conf) == (AdviceKind.SETTING, EXPANDABLE)
    assert "Memory that is never freed grew by 264.00 MiB over the second half of the recording" in advice.summary


def test_a_job_that_does_well_is_told_to_change_nothing():
    advice = advise(steady().source())
    assert (advice.kind, advice.conf, advice.change) == (AdviceKind.NO_CHANGE, None, None)
    assert advice.summary == "No change: the recorded requests need 300.00 MiB of 1000.00 MiB."


def test_a_steady_job_near_its_limit_is_left_alone():
    advice = advise(steady(total_mib=304).source())
    assert advice.kind is AdviceKind.NO_CHANGE
    assert "in the second half of the recording it reserved no more than in the first" in advice.summary


def test_a_job_said_to_be_at_risk_is_told_what_would_lower_its_need():
    """Or that nothing would: its own requests are all there is to go by."""
    advice = advise(steady(total_mib=304).source(), at_risk=True)
    assert advice.kind is AdviceKind.NOTHING
    assert (
        advice.summary == "Nothing that was tried helps: nothing that was tried needs much less than the job does now."
    )
    advice = advise(fragmented(total_mib=1000).source(), at_risk=True)
    assert (advice.kind, advice.conf) == (AdviceKind.SETTING, EXPANDABLE)


def test_without_the_device_s_size_nothing_is_said_of_its_limit():
    advice = advise(steady().source(device_total_bytes=None))
    assert advice.kind is AdviceKind.NO_CHANGE
    assert "is not known, since the device's size is not" in advice.summary


def test_max_split_does_not_stay_beside_expandable_segments():
    """From 2.12 on they do not go together (ALLOCATOR.md 4.4); what decides no sizes stays."""
    conf = "max_split_size_mb:200,pinned_use_background_threads:True"
    advice = advise(fragmented(conf, total_mib=800).source(), circumstances=SAFE)
    assert advice.trials[0].conf == conf
    assert advice.conf == f"pinned_use_background_threads:True,{EXPANDABLE}"


def test_a_memory_fraction_stays_and_is_the_room():
    job = fragmented("per_process_memory_fraction:0.9", total_mib=1000)
    advice = advise(job.source(), circumstances=SAFE)
    assert job.dead
    assert advice.conf == f"per_process_memory_fraction:0.9,{EXPANDABLE}"
    assert "of the 900.00 MiB that was there" in advice.summary
    assert any(each.conf.endswith("garbage_collection_threshold:0.8") for each in advice.trials)
    assert "per_process_memory_fraction can be set only before the process starts" in advice.hazards


def test_garbage_collection_without_a_fraction_is_told_to_do_nothing():
    advice = advise(steady("garbage_collection_threshold:0.8").source())
    assert "as it is set: garbage_collection_threshold does nothing without a memory fraction below 1" in advice.hazards


def test_a_misspelt_key_is_told_with_the_right_one():
    advice = advise(steady("max_splt_size_mb:64").source())
    assert any("did you mean max_split_size_mb?" in each for each in advice.hazards)
    assert not any("max_splt" in each.conf for each in advice.trials[1:])


def test_what_is_in_force_counts_and_not_what_was_set():
    """Something changed it at run time: the snapshot tells both."""
    source = steady(EXPANDABLE).source(conf="max_split_size_mb:64")
    advice = advise(source)
    assert advice.is_exact
    assert advice.trials[0].conf == EXPANDABLE
    assert any("changed it at run time" in each for each in advice.hazards)


def in_time_for(count):
    left = iter([True] * count)
    return lambda: next(left, False)


def test_where_the_time_ends_it_is_told_what_was_not_tried():
    source = fragmented(total_mib=900).source()
    advice = advise(source, circumstances=SAFE, time_left=in_time_for(4))
    assert [each.conf for each in advice.trials] == [
        "",
        EXPANDABLE,
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:16",
    ]
    assert (advice.kind, advice.conf) == (AdviceKind.SETTING, EXPANDABLE)
    assert (
        "there was no time to try expandable_segments:True,roundup_power2_divisions:16, max_split_size_mb:"
        in advice.hazards[-1]
    )
    unmeasured = advise(source, circumstances=SAFE, time_left=in_time_for(20))
    assert unmeasured.conf == EXPANDABLE
    assert unmeasured.hazards[-1] == "there was no time to measure the room that all of them need"


def test_without_time_to_find_help_it_is_not_said_that_there_is_none():
    source = fragmented(total_mib=900).source()
    assert advise(source, time_left=in_time_for(0)).kind is AdviceKind.UNKNOWN
    assert advise(source, time_left=in_time_for(0)).trials == ()
    assert advise(source, time_left=in_time_for(1)).kind is AdviceKind.UNKNOWN
    assert advise(steady(total_mib=304).source(), at_risk=True, time_left=in_time_for(9)).kind is AdviceKind.UNKNOWN


def test_what_would_help_but_must_not_be_used_is_told_where_nothing_else_does():
    job = Job(66)
    for step in range(4):
        job.malloc("activation", 12 + 2 * step)
        job.free("activation")
        job.malloc(f"kept {step}", 6.5 + step)
    job.malloc("last", 19)
    source = job.source()
    assert advise(source, circumstances=SAFE).conf == EXPANDABLE
    advice = advise(source, circumstances=Circumstances("2.14.1", uses_ipc=True))
    assert (advice.kind, advice.conf) == (AdviceKind.NOTHING, None)
    assert advice.summary == (
        "Nothing that was tried helps: every request would be served with expandable_segments:True, but that must not be used here."
    )


def test_before_no_setting_is_said_to_help_more_are_tried():
    job = Job(66)
    for step in range(4):
        job.malloc("activation", 12 + 2 * step)
        job.free("activation")
        job.malloc(f"kept {step}", 6.5 + step)
    job.malloc("last", 19)
    tried = {each.conf for each in advise(job.source(), circumstances=Circumstances("2.14.1", uses_ipc=True)).trials}
    assert {
        "max_split_size_mb:32",
        "max_split_size_mb:512",
        "roundup_power2_divisions:2",
        "large_segment_size_mb:64",
    } <= tried
    too_much = Job(66)
    too_much.malloc("batch", 70)
    assert "max_split_size_mb:32" not in {each.conf for each in advise(too_much.source()).trials}


def test_where_no_setting_helps_a_change_to_the_program_may():
    """Each stream keeps a little in a segment of its own, of which nobody else can have the rest."""
    job = Job(80)
    for stream in range(1, 5):
        job.malloc("activation", 18, stream=stream)
        job.free("activation")
        job.malloc(f"kept {stream}", 1.5, stream=stream)
    job.malloc("last", 19)
    advice = advise(job.source(), circumstances=Circumstances("2.14.1", uses_ipc=True))
    assert job.dead
    assert (advice.kind, advice.conf, advice.change) == (AdviceKind.PROGRAM, None, "one_stream")
    assert advice.summary == (
        "Do all work on one stream: the recorded requests then need 38.56 MiB of the 80.00 MiB that was there; "
        "as it was set they need 92.61 MiB, and one failed."
    )
    assert advice.costs == ("work of different streams no longer overlaps",)


def test_a_replay_that_does_not_fail_where_the_job_did_tells_nothing():
    """Others held more of the device than was told."""
    source = fragmented(total_mib=900).source(device_total_bytes=4000 * MIB)
    advice = advise(source)
    assert advice.kind is AdviceKind.UNKNOWN
    assert not advice.is_exact
    assert "does not fail where the job did" in advice.summary.replace("failed", "did")


def test_no_history_gives_no_advice():
    source = steady().source()
    empty = type(source)((), source.segments, source.settings, source.conf)
    assert advise(empty).kind is AdviceKind.UNKNOWN


def test_settings_of_an_older_torch_are_those_that_it_has():
    advice = advise(fragmented(total_mib=900, version="2.11.0").source(), version="2.11.0")
    assert advice.torch_version == "2.11.0"
    for each in advise(fragmented(total_mib=900).source(), circumstances=Circumstances("2.0.1")).trials:
        assert not parse_settings(each.conf).expandable
        assert "large_segment" not in each.conf
