"""From conditions to alerts: when one fires, when it resolves, what it is called meanwhile."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocscope.alerts.rules import Subject, alerts_of, oom_alert
from allocscope.alerts.states import Alert, AlertState, Progress, advance, inhibited, step
from allocscope.model import Cause, Event, EventKind, State
from tests.alerts.stories import CRITICAL, SUBJECT, WARNING, S, alert, forecast

HOLD_FOR_S, KEEP_FIRING_FOR_S = 10.0, 20.0


def _step(progress: Progress, holds: bool, now_us: int) -> Progress:
    return step(progress, holds=holds, now_us=now_us, hold_for_s=HOLD_FOR_S, keep_firing_for_s=KEEP_FIRING_FOR_S)


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(
            [(0, 1, "pending"), (5, 1, "pending"), (9, 1, "pending"), (10, 1, "firing")], id="fires once held"
        ),
        pytest.param(
            [(0, 1, "pending"), (5, 0, "inactive"), (6, 1, "pending"), (11, 1, "pending")], id="a gap starts over"
        ),
        pytest.param([(0, 0, "inactive"), (100, 0, "inactive")], id="nothing comes of nothing"),
        pytest.param([(0, 1, "pending"), (9999, 1, "pending"), (10004, 1, "firing")], id="a jump alone does not fire"),
        pytest.param(
            [(100, 1, "pending"), (105, 1, "pending"), (3, 1, "pending"), (8, 1, "firing")], id="time goes back"
        ),
        pytest.param([(7, 1, "pending"), (7, 1, "pending"), (7, 1, "pending")], id="time stands still"),
    ],
)
def test_an_alert_comes_to_fire(story):
    progress = Progress()
    for at_s, holds, state in story:
        progress = _step(progress, bool(holds), at_s * S)
        assert progress.state.value == state, at_s


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(
            [(10, 0, "firing"), (19, 0, "firing"), (20, 0, "resolved"), (21, 0, "inactive")], id="resolves once"
        ),
        pytest.param([(10, 0, "firing"), (19, 1, "firing"), (29, 0, "firing"), (39, 0, "resolved")], id="holds again"),
        pytest.param([(9999, 0, "firing"), (10009, 0, "resolved")], id="a jump alone does not resolve"),
        pytest.param([(10, 0, "firing"), (-500, 0, "firing"), (-490, 0, "resolved")], id="time goes back"),
        pytest.param([(10, 0, "firing"), (20, 0, "resolved"), (20, 1, "pending")], id="begins anew"),
    ],
)
def test_an_alert_comes_to_resolve(story):
    progress = Progress(AlertState.FIRING, since_us=0, fired_us=0, seen_us=0)
    for at_s, holds, state in story:
        progress = _step(progress, bool(holds), at_s * S)
        assert progress.state.value == state, at_s


def test_without_hold_and_keep_firing_times_it_follows_at_once():
    fires = step(Progress(), holds=True, now_us=5, hold_for_s=0)
    assert (fires.state, fires.fired_us) == (AlertState.FIRING, 5)
    assert step(fires, holds=False, now_us=6, hold_for_s=0).state is AlertState.RESOLVED


def test_it_does_not_resolve_before_it_began_though_the_clock_was_set_back():
    progress = Progress(AlertState.FIRING, since_us=500 * S, fired_us=500 * S, seen_us=500 * S)
    for at_s in (0, 10, 20):
        progress = _step(progress, False, at_s * S)
    assert (progress.state, progress.since_us) == (AlertState.RESOLVED, 500 * S)


STEPS = st.lists(
    st.tuples(st.integers(-30 * S, 30 * S) | st.integers(-(10**15), 10**15) | st.just(S), st.booleans()), max_size=60
)


@settings(deadline=None)
@given(STEPS)
def test_it_never_fires_before_it_has_held(steps):
    """Held: seen to hold at both ends, and the clock ran on in between."""
    progress, now_us, held_us = Progress(), 0, None
    for elapsed_us, holds in steps:
        now_us += elapsed_us
        before, progress = progress, _step(progress, holds, now_us)
        held_us = None if not holds else 0 if held_us is None else held_us + max(elapsed_us, 0)
        if progress.state is AlertState.FIRING and before.state is not AlertState.FIRING:
            assert held_us is not None
            assert held_us >= HOLD_FOR_S * S


@settings(deadline=None)
@given(STEPS)
def test_whatever_the_clock_did_it_fires_once_held_and_resolves_once_gone(steps):
    progress, now_us = Progress(), 0
    for elapsed_us, holds in steps:
        now_us += elapsed_us
        progress = _step(progress, holds, now_us)
    for _ in range(12):
        now_us += S
        progress = _step(progress, True, now_us)
    assert progress.state is AlertState.FIRING
    for _ in range(20):
        now_us += S
        progress = _step(progress, False, now_us)
    assert progress.state is AlertState.RESOLVED


@settings(deadline=None)
@given(STEPS)
def test_it_resolves_once_for_each_time_it_fired_and_not_before(steps):
    progress, now_us, walk = Progress(), 0, []
    for elapsed_us, holds in steps:
        now_us += elapsed_us
        before, progress = progress, _step(progress, holds, now_us)
        if progress.state is AlertState.RESOLVED:
            assert progress.since_us >= (progress.fired_us or 0)
        if progress.state is not before.state and progress.state in (AlertState.FIRING, AlertState.RESOLVED):
            walk.append(progress.state)
    assert all(a is not b for a, b in pairwise(walk))
    assert walk[:1] in ([], [AlertState.FIRING])


# all alerts of an allocator


def _live(moments, subject: Subject = SUBJECT) -> tuple[list[tuple], tuple[Alert, ...]]:
    """The changes of [(second, state, cause)…] and what is left standing: (second, firing or resolved, severity, cause)."""
    told: list[tuple] = []
    alerts: tuple[Alert, ...] = ()
    for at_s, state, cause in moments:
        alerts, changes = advance(alerts, alerts_of(forecast(state, cause), subject), at_s * S)
        for change in changes:
            rule = change.condition.rule
            told.append((at_s, change.state.value, rule.severity.value, rule.cause.value if rule.cause else None))
    return told, alerts


def test_a_trouble_that_worsens_and_passes_is_one_alert_a_severity():
    def state(at_s: int) -> State:
        return State.CRITICAL if 100 <= at_s < 200 else State.AT_RISK if 0 <= at_s < 300 else State.OK

    told, left = _live([(at_s, state(at_s), Cause.LEAK) for at_s in range(700)])
    assert sorted(told) == [
        (30, "firing", "warning", "leak"),
        (60, "firing", "info", "leak"),
        (110, "firing", "critical", "leak"),
        (259, "resolved", "critical", "leak"),
        (419, "resolved", "warning", "leak"),
        (599, "resolved", "info", "leak"),
    ]
    assert left == ()


def test_a_cause_that_flips_to_and_fro_makes_no_storm():
    """What fires keeps its name, though the cause is another every twenty seconds."""
    causes = [Cause.FRAGMENTATION, Cause.GROWTH]
    told, _ = _live([(at_s, State.CRITICAL, causes[at_s // 20 % 2]) for at_s in range(900)])
    assert sorted(told) == [
        (10, "firing", "critical", "fragmentation"),
        (30, "firing", "warning", "growth"),
        (60, "firing", "info", "growth"),
    ]


def test_a_cause_that_flips_while_pending_does_not_start_over():
    causes = [Cause.FRAGMENTATION, Cause.GROWTH]
    told, _ = _live([(at_s, State.CRITICAL, causes[at_s % 2]) for at_s in range(12)])
    assert told == [(10, "firing", "critical", "fragmentation")]


def test_another_cause_that_lasts_takes_over_and_there_is_always_one_that_fires():
    """The new name fires once it has held for a minute; the old one stands for as long, and has its keep-firing time on top."""
    told, left = _live(
        [(at_s, State.CRITICAL, Cause.GROWTH if at_s < 50 else Cause.FRAGMENTATION) for at_s in range(300)]
    )
    assert [t for t in told if t[2] == "critical"] == [
        (10, "firing", "critical", "growth"),
        (110, "firing", "critical", "fragmentation"),
        (169, "resolved", "critical", "growth"),
    ]
    assert {a.condition.rule.cause for a in left if a.condition.rule.severity is CRITICAL} == {Cause.FRAGMENTATION}


def test_a_third_cause_has_to_hold_as_long_as_any():
    def cause(at_s: int) -> Cause:
        return Cause.GROWTH if at_s < 50 else Cause.LEAK if at_s < 90 else Cause.NEIGHBOUR

    told, _ = _live([(at_s, State.CRITICAL, cause(at_s)) for at_s in range(200)])
    assert [t for t in told if t[2] == "critical"] == [
        (10, "firing", "critical", "growth"),
        (150, "firing", "critical", "neighbour"),
    ]


def test_a_trouble_that_comes_back_under_another_name_before_it_resolved_is_the_same():
    def moment(at_s: int):
        if at_s < 50:
            return at_s, State.CRITICAL, Cause.GROWTH
        return at_s, State.OK if at_s < 90 else State.CRITICAL, Cause.FRAGMENTATION

    told, left = _live([moment(at_s) for at_s in range(140)])
    assert [t for t in told if t[2] == "critical"] == [(10, "firing", "critical", "growth")]
    assert any(a.condition.rule.cause is Cause.GROWTH and a.state is AlertState.FIRING for a in left)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-5, 120),
            st.sampled_from(State),
            st.sampled_from([Cause.LEAK, Cause.GROWTH, Cause.FRAGMENTATION]),
        ),
        max_size=80,
    )
)
def test_whatever_is_foreseen_each_alert_fires_and_resolves_by_turns(moments):
    at_s, story = 1000, []
    for elapsed_s, state, cause in moments:
        at_s += elapsed_s
        story.append((at_s, state, cause))
    story += [(at_s + i, State.OK, Cause.LEAK) for i in range(1, 302)]
    told, left = _live(story)
    assert left == ()
    for name in {t[2:] for t in told}:
        walk = [state for _, state, *of in told if tuple(of) == name]
        assert walk == ["firing", "resolved"] * (len(walk) // 2)


def test_a_change_is_told_once_though_time_stands_still():
    condition = oom_alert(Event("p", 1, 0, EventKind.OOM), SUBJECT)
    alerts, changes = advance((), [condition], 5 * S)
    assert [c.state for c in changes] == [AlertState.FIRING]
    alerts, changes = advance(alerts, [condition], 5 * S)
    assert changes == ()


def test_an_oom_fires_at_once_and_stands_for_ten_minutes():
    condition = oom_alert(Event("p", 1, 0, EventKind.OOM), SUBJECT)
    alerts, changes = advance((), [condition], 0)
    assert [(c.condition.rule.name, c.fired_us, c.resolved_us) for c in changes] == [("AllocscopeOOM", 0, None)]
    for at_s in range(1, 600):
        alerts, changes = advance(alerts, (), at_s * S)
        assert changes == ()
    alerts, changes = advance(alerts, (), 600 * S)
    assert [(c.fired_us, c.resolved_us) for c in changes] == [(0, 600 * S)]
    assert alerts == ()


def test_troubles_of_several_subjects_do_not_mix():
    first, second = Subject(job="a"), Subject(job="b")
    alerts: tuple[Alert, ...] = ()
    for at_s in range(11):
        conditions = [
            *alerts_of(forecast(State.CRITICAL), first),
            *(alerts_of(forecast(State.CRITICAL), second) if at_s > 5 else ()),
        ]
        alerts, _ = advance(alerts, conditions, at_s * S)
    assert {a.condition.subject.job for a in alerts if a.state is AlertState.FIRING} == {"a"}


def test_words_are_those_of_the_moment_it_held_last():
    alerts, _ = advance((), alerts_of(forecast(State.WATCH), SUBJECT), 0)
    later = alerts_of(forecast(State.AT_RISK), SUBJECT)
    alerts, _ = advance(alerts, later, S)
    assert {a.condition for a in alerts} == set(later)


def test_only_the_gravest_of_one_trouble_is_worth_telling():
    critical, warning = alert(CRITICAL), alert(WARNING, Cause.GROWTH)
    other = alert(WARNING, rank=4)
    assert not inhibited(critical, [critical, warning, other])
    assert inhibited(warning, [critical, warning, other])
    assert not inhibited(other, [critical, warning, other])
    assert not inhibited(warning, [alert(CRITICAL, resolved=True), warning])
