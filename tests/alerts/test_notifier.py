"""Telling a channel, by a thread that never holds up its caller, whatever the receiver does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from allocscope.alerts.notify import DeliveryError, Notice, Notifier
from allocscope.alerts.notify_alertmanager import Alertmanager
from allocscope.alerts.notify_http import AddressError, wrong_with
from allocscope.alerts.notify_webhook import Webhook
from tests.alerts.conftest import Answer, Receiver
from tests.alerts.stories import CRITICAL, WARNING, alert, until


class Seen:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.delivered_count = 0
        self.failures: list[tuple[str, bool]] = []
        self.drops: list[tuple[int, str]] = []
        self._changed = threading.Condition()

    def delivered(self, channel: str, count: int, duration_s: float) -> None:
        with self._changed:
            self.delivered_count += count
            self._changed.notify_all()

    def failed(self, channel: str, count: int, reason: str, duration_s: float, *, again: bool) -> None:
        with self._changed:
            self.failures.append((reason, again))
            self._changed.notify_all()

    def dropped(self, channel: str, count: int, reason: str) -> None:
        with self._changed:
            self.drops.append((count, reason))
            self._changed.notify_all()

    def wait_for(self, *, delivered: int = 0, failures: int = 0) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.delivered_count >= delivered and len(self.failures) >= failures, 10.0
            ), (self.delivered_count, self.failures, self.drops)


class Slow:
    """A channel that waits to be let go on."""

    name, batch, refresh_s, lingers = "slow", 1, None, False

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.sent: list[tuple[str, bool]] = []

    def send(self, notices: Sequence[Notice]) -> None:
        self.begun.set()
        self.go_on.wait(10)
        self.sent += [(n.alert.labels["rank"], n.firing) for n in notices]

    def close(self) -> None:
        pass


@contextmanager
def _telling(channel, seen: Seen | None = None, **settings) -> Iterator[Notifier]:
    notifier = Notifier(channel, observer=seen, first_wait_s=0.01, **settings)
    notifier.start()
    try:
        yield notifier
    finally:
        notifier.close(5)


def test_a_webhook_gets_the_promised_json_for_each_change(receiver: Receiver):
    seen = Seen()
    clock = iter([1000.0, 1060.5])
    webhook = Webhook(f"{receiver.address}/hook?token=1", runbook_address="https://docs.example")
    with _telling(webhook, seen, wall_clock=lambda: next(clock)) as notifier:
        notifier.publish([alert()])
        receiver.wait_for(1)
        notifier.publish([alert(resolved=True)])
        fires, resolves = receiver.wait_for(2)
    labels = {
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
    assert fires.path == "/hook?token=1"
    assert fires.content == {
        "version": 1,
        "id": fires.headers["Idempotency-Key"],
        "state": "firing",
        "name": "AllocscopeFragmentationOOMRisk",
        "severity": "critical",
        "cause": "fragmentation",
        "at_us": 1_000_000_000,
        "resolved_us": None,
        "labels": labels,
        "summary": (
            "rank 3 of llama on n7, GPU 2 is about to run out of memory, by fragmentation:"
            " a request of 512 MiB would find 256 MiB"
        ),
        "description": alert().condition.description,
        "runbook_url": "https://docs.example/docs/runbook/AllocscopeFragmentationOOMRisk.md",
        "advice": None,
    }
    assert isinstance(resolves.content, dict)
    assert (resolves.content["state"], resolves.content["resolved_us"]) == ("resolved", 1_060_500_000)
    assert resolves.content["at_us"] == 1_000_000_000
    assert resolves.headers["Idempotency-Key"] != fires.headers["Idempotency-Key"]
    assert (seen.delivered_count, seen.failures, seen.drops) == (2, [], [])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(Answer(500, body=b"oh no"), "server_error", id="500"),
        pytest.param(Answer(503), "server_error", id="503"),
        pytest.param(Answer(429), "busy", id="429"),
        pytest.param(Answer(raw=b"SSH-2.0-OpenSSH\r\n\r\n"), "malformed", id="not HTTP"),
        pytest.param(Answer(raw=b""), "malformed", id="no answer at all"),
        pytest.param(Answer(500, {"Retry-After": "soon"}), "server_error", id="a Retry-After that is none"),
    ],
)
def test_what_may_pass_is_tried_again_as_the_same_change(receiver: Receiver, answer: Answer, reason: str):
    receiver.answers = [answer, answer]
    seen = Seen()
    with _telling(Webhook(receiver.address), seen) as notifier:
        notifier.publish([alert()])
        posts = receiver.wait_for(3)
        seen.wait_for(delivered=1)
    assert seen.failures == [(reason, True), (reason, True)]
    assert len({post.headers["Idempotency-Key"] for post in posts}) == 1
    assert (seen.delivered_count, len(receiver.posts)) == (1, 3)


def test_a_receiver_that_hangs_is_left_after_the_time_limit_and_tried_again(receiver: Receiver):
    receiver.answers = [Answer(release=threading.Event())]
    hanging = receiver.answers[0].release
    seen = Seen()
    with _telling(Webhook(receiver.address, timeout_s=0.2), seen) as notifier:
        notifier.publish([alert()])
        seen.wait_for(delivered=1)
    assert hanging is not None
    hanging.set()
    assert seen.failures == [("timeout", True)]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nthank y"), id="breaks off"),
        pytest.param(Answer(endless=True), id="drips"),
    ],
)
def test_who_says_that_it_took_it_has_it_however_the_answer_goes_on(receiver: Receiver, answer: Answer):
    receiver.answers = [answer]
    seen = Seen()
    with _telling(Webhook(receiver.address, timeout_s=0.2), seen) as notifier:
        notifier.publish([alert()])
        seen.wait_for(delivered=1)
    assert (seen.failures, len(receiver.posts)) == ([], 1)


def test_a_change_has_one_id_whichever_life_of_a_collector_tells_it(receiver: Receiver):
    for clock_s in (1000.0, 2000.0):
        notifier = Notifier(Webhook(receiver.address), wall_clock=lambda: clock_s)  # noqa: B023 (it is over by then)
        notifier.start()
        notifier.publish([alert()])
        receiver.wait(lambda posts: len(posts) % 2 == 1)
        notifier.publish([alert(resolved=True)])
        receiver.wait(lambda posts: len(posts) % 2 == 0)
        notifier.close(5)
    ids = [post.headers["Idempotency-Key"] for post in receiver.posts]
    assert ids[:2] == ids[2:]
    assert len(set(ids)) == 2


def test_a_receiver_that_is_not_there_yet_is_tried_until_it_is(deaf_receiver: Receiver):
    seen = Seen()
    with _telling(Webhook(deaf_receiver.address), seen) as notifier:
        notifier.publish([alert()])
        seen.wait_for(failures=2)
        deaf_receiver.start()
        deaf_receiver.wait_for(1)
        seen.wait_for(delivered=1)
    assert set(seen.failures) == {("unreachable", True)}


def test_a_busy_receiver_is_left_alone_for_as_long_as_it_says(receiver: Receiver):
    receiver.answers = [Answer(429, {"Retry-After": "1"})]
    with _telling(Webhook(receiver.address)) as notifier:
        notifier.publish([alert()])
        first, second = receiver.wait_for(2)
    assert second.at_s - first.at_s >= 1.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(Answer(400, body=b"bad"), "rejected", id="400"),
        pytest.param(Answer(404), "rejected", id="404"),
        pytest.param(Answer(302, {"Location": "/elsewhere"}), "redirect", id="302"),
    ],
)
def test_what_will_not_pass_is_not_tried_again_and_the_next_one_is(receiver: Receiver, answer: Answer, reason: str):
    receiver.answers = [answer]
    seen = Seen()
    with _telling(Webhook(f"{receiver.address}/hook"), seen) as notifier:
        notifier.publish([alert(rank=1)])
        seen.wait_for(failures=1)
        notifier.publish([alert(rank=2)])
        seen.wait_for(delivered=1)
    assert seen.failures == [(reason, False)]
    assert [post.path for post in receiver.posts] == ["/hook", "/hook"]


def test_an_endless_answer_is_read_no_further_than_needed(receiver: Receiver):
    receiver.answers = [Answer(400, body=b"x" * (8 << 20))]
    seen = Seen()
    with _telling(Webhook(receiver.address), seen) as notifier:
        notifier.publish([alert()])
        seen.wait_for(failures=1)
    assert seen.failures == [("rejected", False)]


def test_one_that_a_receiver_chokes_on_does_not_hold_up_the_others():
    class Choosy:
        name, batch, refresh_s, lingers = "choosy", 1, None, False

        def send(self, notices: Sequence[Notice]) -> None:
            if notices[0].alert.labels["rank"] == "1":
                raise DeliveryError("server_error", "answered 500", again=True)

        def close(self) -> None:
            pass

    seen = Seen()
    with _telling(Choosy(), seen) as notifier:
        notifier.publish([alert(rank=rank) for rank in (1, 2, 3)])
        seen.wait_for(delivered=2)


def test_a_channel_with_a_mistake_in_it_does_not_end_the_telling():
    class Mistaken(Slow):
        def send(self, notices: Sequence[Notice]) -> None:
            if notices[0].alert.labels["rank"] == "1":
                raise KeyError("oops")

    seen = Seen()
    with _telling(Mistaken(), seen) as notifier:
        notifier.publish([alert(rank=1), alert(rank=2)])
        seen.wait_for(delivered=1)
    assert seen.failures == [("error", False)]


def test_the_caller_is_never_held_up_and_what_does_not_fit_is_dropped_and_counted():
    channel, seen = Slow(), Seen()
    with _telling(channel, seen, capacity=10) as notifier:
        notifier.publish([alert(rank=0)])
        assert channel.begun.wait(10)
        for rank in range(1, 111):
            notifier.publish([alert(rank=rank)])
        assert (notifier.waiting, seen.delivered_count, channel.sent) == (
            10,
            0,
            [],
        )  # the channel has not been waited for
        channel.go_on.set()
        seen.wait_for(delivered=11)
    assert sum(count for count, reason in seen.drops if reason == "full") == 100
    assert channel.sent == [("0", True), *((str(rank), True) for rank in range(101, 111))]


def test_only_the_latest_state_is_told_of_what_waited():
    channel = Slow()
    with _telling(channel) as notifier:
        notifier.publish([alert(rank=0)])
        assert channel.begun.wait(10)
        notifier.publish([alert(rank=1), alert(rank=2)])
        notifier.publish([alert(rank=1, resolved=True)])
        channel.go_on.set()
    assert channel.sent == [("0", True), ("2", True), ("1", False)]


def test_closing_tells_what_waits_first():
    channel, seen = Slow(), Seen()
    channel.go_on.set()
    notifier = Notifier(channel, observer=seen)
    notifier.publish([alert(rank=rank) for rank in range(20)])
    notifier.start()
    assert notifier.close(10) == 0
    assert (len(channel.sent), seen.drops) == (20, [])


def test_closing_takes_no_longer_than_it_may_and_counts_what_is_left():
    channel, seen = Slow(), Seen()
    notifier = Notifier(channel, observer=seen)
    notifier.start()
    notifier.publish([alert(rank=rank) for rank in range(5)])
    assert channel.begun.wait(10)
    assert notifier.close(0.05) == 4
    assert seen.drops == [(4, "closed")]
    channel.go_on.set()
    assert notifier.close(10) == 0
    assert len(channel.sent) == 1


def test_closing_tries_a_receiver_that_fails_once_more_and_no_further(deaf_receiver: Receiver):
    seen = Seen()
    notifier = Notifier(Webhook(deaf_receiver.address), observer=seen, first_wait_s=60.0)
    notifier.start()
    notifier.publish([alert()])
    seen.wait_for(failures=1)
    until(lambda: notifier.waiting == 1)
    notifier.close(10)
    assert seen.failures == [("unreachable", True), ("unreachable", False)]
    assert seen.drops == [(1, "closed")]


def test_waits_double_up_to_the_longest_and_are_drawn_from_their_upper_half():
    def waits(draw: float) -> list[float]:
        notifier = Notifier(Slow(), first_wait_s=1.0, longest_wait_s=10.0, draw=lambda: draw)
        found = []
        for failures in (1, 2, 3, 4, 5, 1000):
            notifier._failures = failures
            found.append(notifier._wait_s(None))
        return found

    assert waits(0.0) == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert waits(1.0) == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_alertmanager_is_told_all_at_once_and_told_anew_until_it_resolves(receiver: Receiver):
    channel = Alertmanager(
        f"{receiver.address}/am/", page_address="http://page:1", refresh_s=0.1, wall_clock=lambda: 2000.0
    )
    with _telling(channel, wall_clock=lambda: 1000.0) as notifier:
        notifier.publish([alert(CRITICAL, rank=1), alert(WARNING, rank=2)])
        first, again, *_ = receiver.wait_for(3)
    assert first.path == "/am/api/v2/alerts"
    assert first.content == again.content
    assert isinstance(first.content, list)
    assert [a["labels"]["rank"] for a in first.content] == ["1", "2"]
    assert first.content[0]["startsAt"] == "1970-01-01T00:16:40.000+00:00"
    assert first.content[0]["endsAt"] == "1970-01-01T00:33:20.400+00:00"
    assert first.content[0]["generatorURL"] == "http://page:1"
    assert set(first.content[0]["annotations"]) == {"summary", "description", "runbook_url"}


@pytest.mark.parametrize(
    "keep_firing_for_s",
    [
        pytest.param(1.5, id="that it had for as long as it had to"),
        pytest.param(0.2, id="that lingers no longer"),
        pytest.param(600.0, id="that lingers until we end"),
    ],
)
def test_alertmanager_is_told_of_an_end_that_has_come(receiver: Receiver, keep_firing_for_s: float):
    """It would not take one that lies ahead: of two such ends it keeps the later, that of the last refresh."""
    clock = iter([1000.0, 1001.5])
    with _telling(Alertmanager(receiver.address), wall_clock=lambda: next(clock)) as notifier:
        notifier.publish([alert()])
        receiver.wait_for(1)
        notifier.publish([alert(resolved=True, keep_firing_for_s=keep_firing_for_s)])
    _, resolution = receiver.wait_for(2)
    assert isinstance(resolution.content, list)
    assert [a["endsAt"] for a in resolution.content] == ["1970-01-01T00:16:41.500+00:00"]


@pytest.mark.parametrize(
    ("address", "right"),
    [
        ("alertmanager:9093", "must begin with http:// or https://"),
        ("ftp://host", "must begin with http:// or https://"),
        ("", "must begin with http:// or https://"),
        ("http://", "must name a host, such as https://host:9093"),
        ("http:///path", "must name a host, such as https://host:9093"),
        ("http://host:0", "must have a port between 1 and 65535, not 0"),
        ("http://host:99999", "must have a port between 1 and 65535, not 99999"),
        ("http://host/#a", "must be without a #fragment, which is never sent"),
        (" http://host", "must be without white space around it or control characters in it"),
        ("http://host/\n", "must be without white space around it or control characters in it"),
        ("http://ho\x00st", "must be without white space around it or control characters in it"),
        ("http://host:port", "must be an address such as https://host:9093 (Invalid port: 'port')"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_with_what_would_be_right(address: str, right: str):
    assert wrong_with(address) == right
    with pytest.raises(AddressError) as refused:
        Webhook(address)
    assert str(refused.value).endswith(f"is no address to tell of alerts at: it {right}")


@pytest.mark.parametrize("address", ["http://host", "https://user:pw@host:9093/a/b?c=d", "http://[::1]:9093"])
def test_an_address_that_can_be_one_is_taken(address: str):
    assert wrong_with(address) is None


def test_neither_names_nor_errors_show_what_may_be_secret():
    webhook = Webhook("https://user:hunter2@hooks.example:444/services/T0KEN?key=s3cret")
    assert webhook.name == "webhook hooks.example:444"
    webhook.close()
    with pytest.raises(AddressError) as refused:
        Webhook("gopher://user:hunter2@hooks.example/services/T0KEN")
    assert "'gopher://hooks.example'" in str(refused.value)
