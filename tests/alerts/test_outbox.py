"""What is to be told: the latest state, once, the gravest of a trouble, refreshed, bounded."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocscope.alerts.notify import Notice, Outbox
from allocscope.alerts.rules import Severity
from allocscope.alerts.states import Alert
from allocscope.model import Cause
from tests.alerts.stories import CRITICAL, INFO, WARNING, S, alert


def _put(outbox: Outbox, *alerts: Alert, at_s: float = 0.0) -> int:
    return sum(outbox.put(a, wall_us=round(at_s * S), now_s=at_s) for a in alerts)


def _take(outbox: Outbox) -> list[tuple[str, str]]:
    """All that waits, told: (rank, severity and whether it fires)."""
    notices = outbox.take(1000)
    outbox.delivered(notices)
    return [_short(notice) for notice in notices]


def _short(notice: Notice) -> tuple[str, str]:
    labels = notice.alert.labels
    return labels["rank"], f"{labels['severity']} {'fires' if notice.firing else 'resolved'}"


def test_an_alert_is_told_once_however_often_it_is_published():
    outbox = Outbox()
    _put(outbox, alert(), alert())
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert())
    assert _take(outbox) == []


def test_its_resolution_carries_when_it_began_and_when_it_ended():
    outbox = Outbox()
    _put(outbox, alert(), at_s=5)
    _take(outbox)
    _put(outbox, alert(resolved=True), at_s=65)
    (notice,) = outbox.take(10)
    assert (notice.at_us, notice.resolved_us) == (5 * S, 65 * S)


def test_it_never_ended_before_it_began():
    """The teller's clock was set back meanwhile."""
    outbox = Outbox()
    _put(outbox, alert(), at_s=500)
    _put(outbox, alert(resolved=True), at_s=20)
    (notice,) = outbox.take(10)
    assert (notice.at_us, notice.resolved_us) == (500 * S, 500 * S)


def test_the_latest_state_replaces_one_that_waits():
    outbox = Outbox()
    _put(outbox, alert(rank=1), alert(rank=2), alert(rank=1, resolved=True))
    assert _take(outbox) == [("2", "critical fires"), ("1", "critical resolved")]


def test_a_lower_severity_is_not_told_while_a_graver_one_fires():
    outbox = Outbox()
    _put(outbox, alert(INFO), alert(WARNING), alert(CRITICAL, Cause.GROWTH))
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert(INFO, resolved=True))
    assert _take(outbox) == []


def test_a_lower_severity_is_told_once_the_graver_one_has_resolved():
    outbox = Outbox()
    _put(outbox, alert(CRITICAL), alert(WARNING), alert(INFO))
    _take(outbox)
    _put(outbox, alert(CRITICAL, resolved=True))
    assert _take(outbox) == [("3", "critical resolved"), ("3", "warning fires")]


def test_what_was_told_before_it_became_graver_is_told_to_be_resolved():
    outbox = Outbox()
    _put(outbox, alert(WARNING))
    _take(outbox)
    _put(outbox, alert(CRITICAL))
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert(WARNING, resolved=True))
    assert _take(outbox) == [("3", "warning resolved")]


def test_one_on_its_way_when_a_graver_one_came_is_told_to_be_resolved_too():
    outbox = Outbox(refresh_s=60)
    _put(outbox, alert(WARNING))
    on_its_way = outbox.take(10)
    _put(outbox, alert(CRITICAL))
    outbox.delivered(on_its_way)
    assert _take(outbox) == [("3", "critical fires")]
    outbox.refresh(60)
    assert sorted(_take(outbox)) == [("3", "critical fires"), ("3", "warning fires")]
    _put(outbox, alert(WARNING, resolved=True))
    assert _take(outbox) == [("3", "warning resolved")]


def test_another_rank_has_troubles_of_its_own():
    outbox = Outbox()
    _put(outbox, alert(CRITICAL, rank=1), alert(WARNING, rank=2))
    assert _take(outbox) == [("1", "critical fires"), ("2", "warning fires")]


def test_what_fires_is_told_anew_at_each_refresh_until_it_resolves():
    outbox = Outbox(refresh_s=60)
    _put(outbox, alert(), at_s=100)
    _take(outbox)
    outbox.refresh(159.9)
    assert outbox.due_in_s(159.9) == pytest.approx(0.1)
    assert _take(outbox) == []
    outbox.refresh(160)
    assert (outbox.due_in_s(160), _take(outbox)) == (0, [("3", "critical fires")])
    _put(outbox, alert(resolved=True), at_s=161)
    assert _take(outbox) == [("3", "critical resolved")]
    outbox.refresh(300)
    assert (outbox.due_in_s(300), _take(outbox)) == (None, [])


def test_a_refresh_has_the_beginning_of_old_and_the_words_of_now():
    outbox = Outbox(refresh_s=60)
    _put(outbox, alert(), at_s=0)
    _take(outbox)
    newer = alert()
    newer = dataclasses.replace(newer, condition=dataclasses.replace(newer.condition, summary="5 min left"))
    _put(outbox, newer, at_s=30)
    outbox.refresh(60)
    (notice,) = outbox.take(10)
    assert (notice.at_us, notice.alert.condition.summary) == (0, "5 min left")


def test_the_oldest_are_dropped_and_counted_where_too_many_wait():
    outbox = Outbox(capacity=3)
    assert _put(outbox, *(alert(rank=rank) for rank in range(5))) == 2
    assert [rank for rank, _ in _take(outbox)] == ["2", "3", "4"]


def test_what_failed_is_tried_again_behind_the_others():
    outbox = Outbox()
    _put(outbox, alert(rank=1), alert(rank=2))
    assert outbox.failed(outbox.take(1), 1.0) == 0
    assert [rank for rank, _ in _take(outbox)] == ["2", "1"]


def test_what_failed_is_not_tried_again_where_there_is_newer_to_say():
    outbox = Outbox()
    _put(outbox, alert())
    on_its_way = outbox.take(1)
    _put(outbox, alert(resolved=True))
    outbox.failed(on_its_way, 1.0)
    assert _take(outbox) == [("3", "critical resolved")]


def test_a_resolution_is_given_up_when_it_is_old_and_what_fires_is_not():
    outbox = Outbox(give_up_after_s=900)
    _put(outbox, alert(rank=1), alert(rank=2), at_s=0)
    _take(outbox)
    _put(outbox, alert(rank=2, resolved=True), at_s=0)
    _put(outbox, alert(rank=3), at_s=0)
    assert outbox.failed(outbox.take(10), 899.0) == 0
    assert outbox.failed(outbox.take(10), 900.0) == 1
    assert _take(outbox) == [("3", "critical fires")]


def test_a_resolution_that_failed_is_forgotten_where_it_fires_again():
    outbox = Outbox()
    _put(outbox, alert())
    _take(outbox)
    _put(outbox, alert(resolved=True))
    on_its_way = outbox.take(1)
    _put(outbox, alert())
    outbox.failed(on_its_way, 1.0)
    assert _take(outbox) == [("3", "critical fires")]


def test_one_that_fires_again_before_anybody_heard_that_it_had_resolved_is_as_it_was():
    outbox = Outbox()
    _put(outbox, alert(), at_s=1)
    _take(outbox)
    _put(outbox, alert(resolved=True), alert(), at_s=2)
    assert _take(outbox) == []
    _put(outbox, alert(resolved=True), at_s=3)
    (notice,) = outbox.take(10)
    assert (notice.firing, notice.at_us) == (False, S), "it began when they were told that it did"


def test_one_on_its_way_that_resolves_and_fires_again_is_as_it_was_too():
    outbox = Outbox()
    _put(outbox, alert())
    on_its_way = outbox.take(10)
    _put(outbox, alert(resolved=True))
    outbox.delivered(on_its_way)
    _put(outbox, alert())
    assert _take(outbox) == []


def test_one_whose_resolution_may_have_been_heard_is_told_to_fire_again():
    outbox = Outbox()
    _put(outbox, alert())
    _take(outbox)
    _put(outbox, alert(resolved=True))
    outbox.failed(outbox.take(1), 1.0)
    _put(outbox, alert())
    assert _take(outbox) == [("3", "critical fires")]


def test_one_that_resolves_on_its_way_while_muted_is_told_to_be_resolved():
    outbox = Outbox()
    _put(outbox, alert(WARNING))
    on_its_way = outbox.take(10)
    _put(outbox, alert(CRITICAL), alert(WARNING, resolved=True))
    outbox.delivered(on_its_way)
    assert _take(outbox) == [("3", "critical fires"), ("3", "warning resolved")]


def test_a_resolution_that_was_never_told_is_made_good_by_the_next():
    """It fired, and was on its way; it resolved, fired and resolved again while a graver one fired."""
    outbox = Outbox()
    _put(outbox, alert(WARNING))
    on_its_way = outbox.take(10)
    _put(outbox, alert(CRITICAL), alert(WARNING, resolved=True), alert(WARNING), alert(WARNING, resolved=True))
    outbox.delivered(on_its_way)
    assert _take(outbox) == [("3", "critical fires"), ("3", "warning resolved")]


# what lingers: Alertmanager tells nobody of what is over before its group_wait is


def _lingering() -> Outbox:
    """A critical alert that fired at 0 and, its job having ended, resolved at 20 s; it is to be there for a minute."""
    outbox = Outbox(refresh_s=600, lingers=True)
    _put(outbox, alert())
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert(resolved=True), at_s=20)
    return outbox


def test_what_resolved_before_its_time_lingers_for_the_rest_of_it():
    outbox = _lingering()
    assert (_take(outbox), outbox.due_in_s(20)) == ([], 40)
    outbox.end_lingering(59.9)
    assert _take(outbox) == []
    outbox.end_lingering(60)
    (notice,) = outbox.take(10)
    assert (notice.at_us, notice.resolved_us) == (0, 20 * S), "the end that it had"
    assert outbox.due_in_s(60) is None


def test_what_fires_again_while_it_lingers_never_ended():
    outbox = _lingering()
    _put(outbox, alert(), at_s=30)
    outbox.end_lingering(1000)
    assert _take(outbox) == []


def test_what_resolves_in_its_time_does_not_linger():
    outbox = Outbox(lingers=True)
    _put(outbox, alert())
    _take(outbox)
    _put(outbox, alert(resolved=True), at_s=61)
    assert _take(outbox) == [("3", "critical resolved")]


def test_what_lingers_is_told_anew_as_firing():
    outbox = Outbox(refresh_s=30, lingers=True)
    _put(outbox, alert())
    _take(outbox)
    _put(outbox, alert(resolved=True), at_s=20)
    outbox.refresh(30)
    assert _take(outbox) == [("3", "critical fires")]


def test_what_resolved_before_its_time_and_before_a_restart_is_left_to_end_by_itself():
    """It lingered when the process before ended; its end, told now, might come before anybody has heard of it."""
    outbox = Outbox(lingers=True)
    _put(outbox, alert(resolved=True, fired_for_s=20))
    assert _take(outbox) == []
    _put(outbox, alert(resolved=True, fired_for_s=600))
    assert _take(outbox) == [("3", "critical resolved")]


def test_what_nobody_was_told_of_does_not_linger():
    outbox = Outbox(lingers=True)
    _put(outbox, alert(WARNING), alert(CRITICAL))
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert(WARNING, resolved=True), at_s=20)
    outbox.end_lingering(1000)
    assert _take(outbox) == []


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["fires", "resolves", "sent", "delivered", "lost", "lost the answer"]),
        st.sampled_from([CRITICAL, WARNING, INFO]),
        st.sampled_from([Cause.LEAK, Cause.GROWTH]),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([CRITICAL, WARNING, INFO])), max_size=40), st.data())
def test_a_receiver_that_takes_all_hears_of_no_alert_anew_that_it_fires_before_it_has_heard_of_its_end(moves, data):
    """However late it is told."""
    outbox, standing, heard = Outbox(), frozenset[Severity](), dict[str, str]()
    for fires, severity in moves:
        if fires:
            _put(outbox, alert(severity))
        elif severity in standing:
            _put(outbox, alert(severity, resolved=True))
        standing = standing | {severity} if fires else standing - {severity}
        if data.draw(st.booleans()):
            for _, told in _take(outbox):
                which, state = told.split()
                assert (heard.get(which), state) != ("fires", "fires")
                heard[which] = state


@settings(deadline=None)
@given(MOVES, st.sampled_from([None, 60.0]), st.booleans())
def test_whatever_fails_on_the_way_the_receiver_knows_at_last_what_is_gravest(moves, refresh_s, lingers):
    """And it takes nothing for firing that has resolved."""
    outbox, standing, known = Outbox(refresh_s=refresh_s, lingers=lingers), set(), {}
    on_its_way: tuple[Notice, ...] = ()
    for move, severity, cause in moves:
        its = (tuple(sorted(alert(severity, cause).labels.items())), severity.level)
        if move == "fires":
            _put(outbox, alert(severity, cause))
            standing.add(its)
        elif move == "resolves" and its in standing:
            _put(outbox, alert(severity, cause, resolved=True))
            standing.remove(its)
        elif move == "sent" and not on_its_way:
            on_its_way = outbox.take(2)
        elif move == "delivered":
            known.update({n.key: n.firing for n in on_its_way})
            outbox.delivered(on_its_way)
            on_its_way = ()
        elif move in ("lost", "lost the answer"):
            if move == "lost the answer":
                known.update({n.key: n.firing for n in on_its_way})
            outbox.failed(on_its_way, 1.0)
            on_its_way = ()
    outbox.failed(on_its_way, 1.0)
    outbox.end_lingering(1000.0)
    while notices := outbox.take(2):
        known.update({n.key: n.firing for n in notices})
        outbox.delivered(notices)
    gravest = max((level for _, level in standing), default=None)
    assert {key for key, firing in known.items() if firing} <= {key for key, _ in standing}
    assert all(known.get(key) for key, level in standing if level == gravest)
