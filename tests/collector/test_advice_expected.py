"""What is said of a request that a forecast is about, and what a replay knows of the device beside its snapshot."""

from __future__ import annotations

import pytest

from allocscope.allocator.snapshot import read_snapshot
from allocscope.collector.advice_facts import device_facts, other_used
from allocscope.collector.advice_task import DeviceFacts, Limits, ReplayTask, task_of_line
from allocscope.collector.advice_words import LONGEST, alert_words
from allocscope.collector.advice_worker import advice_of
from allocscope.model import Advice, AdviceKind, CaptureReason, Forecast, Sample, State
from allocscope.storage.captures import CaptureRecord, CaptureState
from allocscope.storage.sql import open_repository
from tests.collector.harness import START_US, ref
from tests.collector.replayed import MIB, OTHER_BYTES, TOTAL_BYTES, holey, job_process, packed, samples


def advised(request_bytes: int | None, conf: str = "", *, dies: bool = False, time_left=lambda: True) -> Advice:
    snapshot = read_snapshot(packed(holey(conf, dies=dies)), "made")
    facts = DeviceFacts("GPU-1", 0, TOTAL_BYTES, ((0, OTHER_BYTES),), request_bytes, at_risk=True)
    return advice_of(snapshot, facts, "2.14.1+cu130", time_left)


def test_one_that_only_another_setting_would_serve_at_the_recordings_end_makes_it_the_advice():
    advice = advised(800 * MIB)
    assert advice.kind is AdviceKind.SETTING
    assert advice.conf == "expandable_segments:True"
    assert advice.summary == (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. A request of 800.00 MiB, which the forecast is about (the largest"
        " that was recorded is of 200.00 MiB), at the recording's end fails as it is set, and is served then."
    )
    assert advice.gains == ("the request that the forecast is about is served after those that were recorded",)
    assert any("expandable_segments does not go with" in hazard for hazard in advice.hazards)


def test_one_that_nothing_would_serve_is_said_to_be_too_large():
    advice = advised(1500 * MIB)
    assert advice.kind is AdviceKind.NOTHING
    assert advice.summary.endswith("at the recording's end fails under all settings that were tried.")


def test_one_that_would_be_served_as_it_is_set_is_said_to_be():
    advice = advised(800 * MIB, "expandable_segments:True")
    assert advice.summary.endswith("at the recording's end is served as it is set, too.")


@pytest.mark.parametrize(
    "request_bytes", [None, 110 * MIB], ids=["not known", "no larger than what was recorded, and served"]
)
def test_where_it_adds_nothing_nothing_is_added(request_bytes):
    assert "the forecast is about" not in advised(request_bytes).summary


def test_of_a_run_that_died_the_error_itself_says_what_did_not_fit():
    advice = advised(800 * MIB, dies=True)
    assert advice.trials[0].failed_at is not None
    assert "the forecast is about" not in advice.summary


def test_a_version_that_is_none_is_as_one_that_is_not_known():
    snapshot = read_snapshot(packed(holey()), "made")
    facts = DeviceFacts("GPU-1", 0, TOTAL_BYTES, ((0, OTHER_BYTES),), None, at_risk=True)
    assert advice_of(snapshot, facts, "nightly", lambda: True).kind is AdviceKind.SETTING


def test_settings_that_cannot_be_read_make_it_an_estimate():
    snapshot = holey()
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = 17
    facts = DeviceFacts("GPU-1", 0, TOTAL_BYTES, ((0, OTHER_BYTES),), None, at_risk=True)
    advice = advice_of(read_snapshot(packed(snapshot), "made", tolerant=True), facts, None, lambda: True)
    assert not advice.is_exact
    assert advice.exactness.startswith("an estimate: the recorded settings cannot be read, and the defaults are taken")
    assert advice.summary.endswith("This is an estimate.")


# what the database knows


def test_what_others_used_is_the_middle_of_three_samples_in_a_row():
    """A segment that was got between the two figures of the second sample counts twice there."""
    told = [
        Sample(at, at * 10, reserved_bytes=reserved, device_free_bytes=free)
        for at, (reserved, free) in enumerate([(40, 50), (40, 45), (45, 45), (45, None), (45, 35), (45, 35)], 1)
    ]
    assert other_used(told, 100) == ((10, 10), (20, 10), (30, 15), (50, 20), (60, 20))


def capture(**more) -> CaptureRecord:
    given = {"device_uuid": "GPU-1", "time_us": START_US + 2_000_000, "reason": CaptureReason.ASKED, **more}
    return CaptureRecord(f"{9:032x}", f"{1:032x}", "train", "n1", given.pop("reason"), CaptureState.KEPT, **given)


def test_facts_are_those_of_the_captures_moment(tmp_path):
    repository = open_repository(f"sqlite:///{tmp_path}/c.db")
    repository.store([samples()])
    [facts] = device_facts(repository, capture(), job_process())
    assert (facts.uuid, facts.ordinal, facts.total_bytes, facts.request_bytes) == ("GPU-1", 0, TOTAL_BYTES, None)
    assert facts.other_used == tuple((START_US + at * 1_000_000, OTHER_BYTES) for at in (1, 2, 3))
    assert not facts.at_risk
    repository.save_forecasts([(ref(), Forecast(1, State.AT_RISK, request_bytes=7))], made_us=1)
    [facts] = device_facts(repository, capture(), job_process())
    assert (facts.request_bytes, facts.at_risk) == (7, True)
    task = ReplayTask("a capture", "2.14.1", (facts,), Limits(1.5, 7))
    assert task_of_line(task.to_line()) == task


@pytest.mark.parametrize("reason", [CaptureReason.OOM, CaptureReason.FORECAST])
def test_who_was_captured_unasked_is_at_risk(tmp_path, reason):
    repository = open_repository(f"sqlite:///{tmp_path}/c.db")
    [facts] = device_facts(repository, capture(reason=reason, device_uuid=None), job_process())
    assert facts.at_risk
    assert (facts.total_bytes, facts.other_used) == (TOTAL_BYTES, ())
    assert device_facts(repository, capture(device_uuid="GPU-9"), job_process()) == ()


# as an alert says it


def test_an_alert_says_the_recommendation_and_whether_it_is_an_estimate():
    sure = Advice(AdviceKind.SETTING, "Set it so.", is_exact=True)
    assert alert_words(sure) == "Set it so."
    unsure = Advice(
        AdviceKind.NOTHING, "Nothing helps. This is an estimate.", exactness="an estimate: entry 7 is not explained"
    )
    assert alert_words(unsure) == "Nothing helps. This is an estimate: entry 7 is not explained."
    assert alert_words(Advice(AdviceKind.NO_CHANGE, "All is well.")) == (
        "All is well. This is an estimate: the replay could not be checked against what happened."
    )
    assert alert_words(Advice(AdviceKind.UNKNOWN, "the replay was killed")) is None
    assert len(alert_words(Advice(AdviceKind.NOTHING, "x" * 5000, is_exact=True)) or "") == LONGEST
