"""Alerts say what would help, once that is known: of the rank that goes first, or of another where nothing is known of that one."""

from __future__ import annotations

from allocscope.alerts.gather import Gathering
from allocscope.alerts.notify import Outbox
from allocscope.alerts.notify_alertmanager import Alertmanager
from allocscope.alerts.notify_webhook import Webhook
from allocscope.alerts.rules import OOM, oom_alert
from allocscope.alerts.states import Alert, AlertState, Progress
from allocscope.model import Event, EventKind, Sample
from tests.alerts.conftest import Receiver
from tests.alerts.stories import INFO, S, alert
from tests.alerts.test_gather import foreseen, member, subject, watch
from tests.alerts.test_notifier import _telling
from tests.alerts.test_outbox import _put, _take

HELPS = "expandable_segments:True serves every recorded request; 3.1 GiB less are reserved"


def gathered(*seconds: float) -> tuple[Gathering, dict]:
    """A job whose ranks have so long left."""
    gathering = Gathering()
    watches = {subject(rank): watch(rank, foreseen(left)) for rank, left in enumerate(seconds)}
    for one in watches.values():
        gathering.take(one.alerts[0], 0)
    gathering.retell(watches, 60 * S)
    return gathering, watches


def test_a_standing_alert_is_told_again_with_advice_and_then_keeps_quiet():
    gathering, watches = gathered(60.0)
    watches[subject(0)].advise(HELPS)
    gathering.advise(subject(0), HELPS)
    [told] = gathering.retell(watches, 65 * S)
    assert told.condition.advice == HELPS
    assert told.condition.description_with_advice == (
        f"{told.condition.description} A replay of its own requests says: {HELPS}"
    )
    assert gathering.retell(watches, 70 * S) == []


def test_advice_is_of_the_rank_that_goes_first():
    gathering, watches = gathered(60.0, 50.0)
    gathering.advise(subject(0), "for 0")
    [told] = gathering.retell(watches, 65 * S)
    assert told.condition.first == subject(1)
    assert told.condition.advice == (
        "(of rank 0 of llama on n0, GPU 0, as none is known of the one that goes first) for 0"
    )
    gathering.advise(subject(1), "for 1")
    [told] = gathering.retell(watches, 70 * S)
    assert told.condition.advice == "for 1"


def test_what_a_watch_was_advised_its_later_alerts_say_too():
    one = watch(3, foreseen(60.0))
    one.advise(HELPS)
    assert [each.condition.advice for each in one.alerts] == [HELPS]
    one.sample(Sample(1, 10 * S, reserved_bytes=1, allocated_bytes=1, device_total_bytes=100, device_free_bytes=99))
    [alerted] = one.event(Event("p", 2, 11 * S, EventKind.OOM))
    assert (alerted.condition.rule, alerted.condition.advice) == (OOM, HELPS)


def test_advice_for_a_process_that_ended_goes_to_what_tells_of_the_past_only():
    gathering, watches = gathered(60.0)
    error = oom_alert(Event("p", 1, 1, EventKind.OOM), subject(0))
    gathering.take(Alert(error, Progress(AlertState.FIRING, since_us=S, fired_us=S)), 0)
    gathering.advise(subject(0), HELPS, over=True)
    gathering.retell(watches, 120 * S)
    assert {one.condition.rule.name: one.condition.advice for one in gathering.standing()} == {
        "AllocscopeMemoryLeak": None,
        "AllocscopeOOM": HELPS,
    }


def test_an_alert_that_ends_still_says_what_would_have_helped():
    gathering, watches = gathered(60.0)
    gathering.advise(subject(0), HELPS)
    gathering.retell(watches, 65 * S)
    over = gathering.take(member(0, at_s=99, over=True), 99 * S)
    assert over is not None
    assert over.condition.advice == HELPS


def test_the_first_advice_is_told_at_once_and_other_words_are_not():
    outbox = Outbox()
    _put(outbox, alert())
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert().advised(HELPS))
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert().advised(HELPS), alert().advised("something else"))
    assert _take(outbox) == []


def test_advice_for_what_a_graver_alert_stands_for_is_told_with_that():
    outbox = Outbox()
    _put(outbox, alert(), alert(INFO))
    assert _take(outbox) == [("3", "critical fires")]
    _put(outbox, alert(INFO).advised(HELPS))
    assert _take(outbox) == []


def test_a_webhook_is_told_once_more_with_advice_under_an_id_of_its_own(receiver: Receiver):
    with _telling(Webhook(receiver.address)) as notifier:
        notifier.publish([alert()])
        receiver.wait_for(1)
        notifier.publish([alert().advised(HELPS)])
        plain, advised = receiver.wait_for(2)
    assert isinstance(plain.content, dict)
    assert isinstance(advised.content, dict)
    assert (plain.content["advice"], advised.content["advice"]) == (None, HELPS)
    assert (plain.content["state"], advised.content["state"]) == ("firing", "firing")
    assert plain.content["at_us"] == advised.content["at_us"]
    assert plain.content["id"] != advised.content["id"] == advised.headers["Idempotency-Key"]
    assert advised.content["description"].endswith(HELPS)


def test_an_alertmanager_has_it_as_an_annotation_of_the_same_alert(receiver: Receiver):
    with _telling(Alertmanager(receiver.address)) as notifier:
        notifier.publish([alert()])
        receiver.wait_for(1)
        notifier.publish([alert().advised(HELPS)])
        plain, advised = receiver.wait_for(2)
    assert isinstance(plain.content, list)
    assert isinstance(advised.content, list)
    [before], [after] = plain.content, advised.content
    assert before["labels"] == after["labels"]
    assert "advice" not in before["annotations"]
    assert after["annotations"]["advice"] == HELPS
