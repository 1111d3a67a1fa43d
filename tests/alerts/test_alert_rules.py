"""The rules: what is called what, when, and in which words."""

import pytest

from allocscope.alerts.rules import (
    RULES,
    RetryRounds,
    Severity,
    Subject,
    alerts_of,
    dropping_alert,
    node_alerts,
    oom_alert,
)
from allocscope.model import Cause, Event, EventKind, Forecast, Sample, State
from tests.alerts.stories import CRITICAL, INFO, SUBJECT, WARNING, S, forecast


def test_the_promised_names_are_all_there_and_no_others():
    assert {rule.name for rule in RULES} == {
        "AllocscopeFragmentationOOMRisk",
        "AllocscopeCapacityOOMRisk",
        "AllocscopeMemoryGrowth",
        "AllocscopeMemoryLeak",
        "AllocscopeNeighbourPressure",
        "AllocscopeAllocatorThrashing",
        "AllocscopeOOM",
        "AllocscopeNodeSilent",
        "AllocscopeDroppingData",
    }


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        (Cause.FRAGMENTATION, "AllocscopeFragmentationOOMRisk"),
        (Cause.CAPACITY, "AllocscopeCapacityOOMRisk"),
        (Cause.GROWTH, "AllocscopeMemoryGrowth"),
        (Cause.LEAK, "AllocscopeMemoryLeak"),
        (Cause.NEIGHBOUR, "AllocscopeNeighbourPressure"),
    ],
)
def test_a_forecast_is_called_by_its_cause(cause, name):
    (watched,) = alerts_of(forecast(State.WATCH, cause), SUBJECT)
    assert (watched.rule.name, watched.rule.cause) == (name, cause)


@pytest.mark.parametrize(
    ("state", "severities"),
    [
        (State.OK, []),
        (State.WATCH, [INFO]),
        (State.AT_RISK, [WARNING, INFO]),
        (State.CRITICAL, [CRITICAL, WARNING, INFO]),
    ],
)
def test_a_state_implies_its_severity_and_each_below(state, severities):
    assert [c.rule.severity for c in alerts_of(forecast(state), SUBJECT)] == severities


def test_a_critical_state_whose_cause_is_not_known_is_not_silent():
    conditions = alerts_of(forecast(State.CRITICAL, cause=None), SUBJECT)
    assert conditions[0].labels["alertname"] == "AllocscopeCapacityOOMRisk"


def test_only_forecasts_are_critical():
    """What has happened cannot be prevented any more."""
    assert {rule.name for rule in RULES if rule.severity is Severity.CRITICAL and rule.cause is None} == set()


def test_an_alert_says_who_what_and_how_much():
    critical = alerts_of(forecast(State.CRITICAL), SUBJECT)[0]
    assert critical.labels == {
        "alertname": "AllocscopeFragmentationOOMRisk",
        "severity": "critical",
        "cause": "fragmentation",
        "incident": "memory",
        "node": "n7",
        "job": "llama",
        "rank": "3",
        "gpu": "2",
        "uuid": "GPU-3f",
    }
    assert critical.summary == (
        "rank 3 of llama on n7, GPU 2 is about to run out of memory, by fragmentation:"
        " a request of 512 MiB would find 256 MiB"
    )
    assert "Headroom 256.00 MiB, largest request 512.00 MiB, time left 7 min." in critical.description
    assert critical.rule.runbook_url == "docs/runbook/AllocscopeFragmentationOOMRisk.md"


def test_a_runbook_is_found_below_a_given_address():
    rule = next(rule for rule in RULES if rule.name == "AllocscopeOOM")
    assert rule.runbook_url_at("https://docs.example/x/") == "https://docs.example/x/docs/runbook/AllocscopeOOM.md"


def test_what_is_not_known_is_called_unknown_and_is_no_label():
    (watched,) = alerts_of(Forecast(0, State.WATCH, Cause.LEAK), Subject(job="llama"))
    assert watched.labels == {
        "alertname": "AllocscopeMemoryLeak",
        "severity": "info",
        "cause": "leak",
        "incident": "memory",
        "job": "llama",
    }
    assert "Headroom unknown, largest request unknown, time left unknown." in watched.description


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        (SUBJECT, "rank 3 of llama on n7, GPU 2"),
        (Subject(node="n7", job="llama", gpu=2, pid=77), "llama on n7, GPU 2"),
        (Subject(node="n7"), "n7"),
        (Subject(uuid="GPU-3f"), "GPU-3f"),
        (Subject(), "somebody"),
    ],
)
def test_a_subject_reads_as_people_say_it(subject, text):
    assert str(subject) == text


def test_braces_in_names_and_messages_are_just_text():
    event = Event("p", 1, 0, EventKind.OOM, message="tried {to} allocate {0}")
    condition = oom_alert(event, Subject(job="{job}"))
    assert "tried {to} allocate {0}" in condition.description
    assert "{job} ran out of memory" in condition.summary


def test_an_oom_says_what_was_asked_for_and_what_was_free():
    event = Event(
        "p", 9, 0, EventKind.OOM, requested_bytes=3 << 30, device_free_bytes=100 << 20, message="CUDA out of memory."
    )
    condition = oom_alert(event, SUBJECT)
    assert condition.labels["severity"] == "warning"
    assert condition.summary == (
        "rank 3 of llama on n7, GPU 2 ran out of memory: 3.00 GiB were asked for, 100.00 MiB of the device were free"
    )
    assert condition.description == (
        "A torch.OutOfMemoryError was raised; the job may have caught it. CUDA out of memory. `allocscope oom` explains"
        " the message in the job's log."
    )


def _observed(counts: list[tuple[int, int | None]]) -> RetryRounds:
    rounds = RetryRounds()
    for sequence, (at_s, total) in enumerate(counts, start=1):
        rounds = rounds.observe(Sample(sequence, at_s * S, num_alloc_retries=total))
    return rounds


@pytest.mark.parametrize(
    ("counts", "now_s", "thrashes"),
    [
        pytest.param([(0, 0), (10, 1), (20, 2), (30, 3), (40, 4), (50, 5)], 50, True, id="five within five minutes"),
        pytest.param([(0, 0), (10, 1), (20, 2), (30, 3), (40, 4)], 50, False, id="four are not enough"),
        pytest.param([(0, 7), (10, 7), (20, 7)], 20, False, id="rounds of before it was watched"),
        pytest.param([(0, 0), (10, 500)], 10, False, id="many at one moment are one"),
        pytest.param([(0, 0)] + [(100 * i, i) for i in range(1, 30)], 2900, False, id="one now and then"),
        pytest.param([(0, 0), (10, 1), (20, 2), (30, 3), (40, 4), (50, 5)], 400, False, id="long ago"),
        pytest.param([(0, 9), (10, 0), (20, 9), (30, 0), (40, 9), (50, 0), (60, 9)], 60, False, id="resets are none"),
        pytest.param([(0, 0), (10, None), (20, None), (30, None)], 30, False, id="not known"),
        pytest.param([(900, 0), (910, 1), (920, 2), (930, 3), (940, 4), (5, 5)], 5, False, id="the clock set back"),
    ],
)
def test_thrashing_is_flushing_again_and_again(counts, now_s, thrashes):
    conditions = _observed(counts).alerts(now_s * S, SUBJECT)
    assert [c.rule.name for c in conditions] == (["AllocscopeAllocatorThrashing"] if thrashes else [])


def test_thrashing_keeps_no_more_than_it_needs():
    assert len(_observed([(i, i) for i in range(1000)]).times_us) <= 20


@pytest.mark.parametrize(("silent_for_s", "fires"), [(59.9, False), (60.0, True)])
def test_a_node_is_silent_after_a_minute(silent_for_s, fires):
    conditions = node_alerts("n7", silent_for_s)
    assert [c.summary for c in conditions] == (["nothing was heard of node n7 for 60 s"] if fires else [])


def test_dropped_data_is_the_nodes_whoever_of_it_lost_it():
    condition = dropping_alert(Subject(node="n7", job="llama", rank=3), 12, "samples", "the buffer was full")
    assert condition.labels == {
        "alertname": "AllocscopeDroppingData",
        "severity": "warning",
        "incident": "unwatched",
        "node": "n7",
    }
    assert condition.place == {"node": "n7", "job": "llama", "rank": "3"}
    assert condition.summary.startswith("data is lost on the way from rank 3 of llama on n7: 12 samples dropped")


def test_what_no_node_lost_the_collector_did():
    condition = dropping_alert(Subject(), 12, "samples", "there was no time")
    assert condition.summary == "data is lost on the way from the collector: 12 samples dropped (there was no time)"
    assert set(condition.labels) == {"alertname", "severity", "incident"}


def test_a_reason_that_somebody_else_wrote_is_one_short_line():
    condition = dropping_alert(Subject(node="n7"), 1, "samples", "\n  " + "x" * 10_000 + "\nand more")
    assert condition.summary == f"data is lost on the way from n7: 1 samples dropped ({'x' * 159}…)"


def test_dropped_data_is_told_with_its_count_and_reason():
    condition = dropping_alert(Subject(node="n7"), 12, "samples", "the spool was full")
    assert condition.summary == "data is lost on the way from n7: 12 samples dropped (the spool was full)"
    assert "an unknown number of samples" in dropping_alert(Subject(node="n7"), None, "samples", "?").summary
