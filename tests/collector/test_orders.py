"""Captures on order: each node's stream is told of them once, whichever collector took the order; nobody waits for ever."""

import asyncio
import os
from contextlib import contextmanager

import httpx
import pytest

from allocscope.collector.observation import Observation
from allocscope.collector.orders import Orders
from allocscope.model import CaptureOrder, CaptureReason, wire
from allocscope.storage.captures import CaptureRecord, CaptureState, OrderLimits
from allocscope.storage.errors import StorageBusy
from allocscope.storage.sql import open_repository
from tests.collector.harness import WITHIN_S, Stream, batch, collector, process, sample, stream
from tests.collector.uploads import bring, capture, hello, memory_bytes, send
from tests.e2e.processes import until

NOW_US = 1_800_000_000_000_000
PLENTY = OrderLimits(100, 100, 100)


def record(number: int = 1, node: str = "n1", **more) -> CaptureRecord:
    state = CaptureState.ORDERED
    given = {"ordered_us": NOW_US, **more}
    return CaptureRecord(f"{number:032x}", "p1", "train", node, CaptureReason.ASKED, state, **given)


class Nodes:
    """Orders, with a clock that a test sets and streams that write down what they are told."""

    def __init__(self, path) -> None:
        self.repository, self.observation = open_repository(f"sqlite:///{path}"), Observation()
        self.captures = self.repository.captures
        self.now_us = NOW_US
        self.orders = Orders(self.captures, self.observation, now_us=lambda: self.now_us)
        self.told: list[tuple[str, str, CaptureOrder]] = []
        self.news = asyncio.Event()

    def attach(self, node: str = "n1"):
        def hand(message) -> None:
            told = wire.order_from_wire(message.order)
            assert isinstance(told, CaptureOrder)
            self.told.append((node, message.process_id, told))
            self.news.set()

        return self.orders.attach(node, hand)

    def state(self, number: int = 1):
        found = self.captures.find(f"{number:032x}")
        assert found
        return found.state, found.problem


@pytest.fixture
async def nodes(tmp_path):
    made = Nodes(tmp_path / "c.db")
    yield made
    made.repository.close()


async def test_a_stream_is_told_once_of_the_orders_of_its_node(nodes):
    one = record(1, history_us=5, most_history_entries=7, tensors=True, device_uuid="GPU-1")
    nodes.captures.order([one, record(2, "n2")], PLENTY)
    nodes.attach()
    for _ in range(3):
        await nodes.orders.look()
    assert nodes.told == [("n1", "p1", CaptureOrder(f"{1:032x}", "GPU-1", 5, 7, True, CaptureReason.ASKED))]
    assert [nodes.state(number)[0] for number in (1, 2)] == [CaptureState.SENT, CaptureState.ORDERED]


async def test_the_next_stream_of_a_node_is_told_again_of_what_was_not_answered(nodes):
    nodes.captures.order([record(1), record(2)], PLENTY)
    before = nodes.attach()
    await nodes.orders.look()
    nodes.captures.fail({f"{1:032x}": "answered"})
    nodes.orders.detach(before)
    nodes.attach()
    await nodes.orders.look()
    assert [told.capture_id[-1] for _, _, told in nodes.told] == ["1", "2", "2"]


async def test_a_stream_that_was_replaced_is_told_nothing_more(nodes):
    before = nodes.attach()
    nodes.attach()
    nodes.orders.detach(before)
    nodes.captures.order([record(1)], PLENTY)
    await nodes.orders.look()
    assert len(nodes.told) == 1


@pytest.mark.parametrize(
    ("history_us", "attached", "says"),
    [
        (None, False, "node 'n1' had no stream to a collector for 7 min: look whether its daemon runs"),
        (
            None,
            True,
            "node 'n1' was told of it, and no answer came within 7 min: does its daemon reach the collector",
        ),
        (60_000_000, False, "node 'n1' had no stream to a collector for 8 min"),
    ],
)
async def test_an_order_that_nobody_answers_is_given_up_and_says_why(nodes, history_us, attached, says):
    nodes.captures.order([record(1, history_us=history_us)], PLENTY)
    if attached:
        nodes.attach()
    await nodes.orders.look()
    nodes.now_us = NOW_US + 420_000_000 + (history_us or 0) - 1
    await nodes.orders.look()
    assert nodes.state()[1] is None
    nodes.now_us += 1
    await nodes.orders.look()
    state, problem = nodes.state()
    assert state is CaptureState.FAILED
    assert problem.startswith(says)
    given_up = {"reason": "asked", "outcome": "given_up"}
    assert nodes.observation.registry.get_sample_value("allocscope_captures_ordered_total", given_up) == 1


async def test_an_order_that_is_too_late_is_not_told(nodes):
    nodes.captures.order([record(1)], PLENTY)
    nodes.now_us = NOW_US + 420_000_000
    nodes.attach()
    await nodes.orders.look()
    assert nodes.told == []


async def test_a_database_that_takes_nothing_costs_nothing_but_another_look(nodes, monkeypatch):
    nodes.captures.order([record(1)], PLENTY)
    nodes.attach()
    marking = type(nodes.captures).sent

    def busy(*_, **__):
        raise StorageBusy("busy")

    monkeypatch.setattr(type(nodes.captures), "sent", busy)
    await nodes.orders.look()
    monkeypatch.setattr(type(nodes.captures), "sent", marking)
    await nodes.orders.look()
    assert len(nodes.told) == 1, "it was told before"
    assert nodes.state()[0] is CaptureState.SENT
    assert nodes.observation.registry.get_sample_value("allocscope_capture_orders_failures_total") == 1


async def test_what_is_ordered_here_is_told_at_once(nodes):
    nodes.attach()
    following = asyncio.create_task(nodes.orders.follow())
    try:
        await asyncio.sleep(0)
        nodes.captures.order([record(1)], PLENTY)
        await asyncio.to_thread(nodes.orders.wake)
        await asyncio.wait_for(nodes.news.wait(), WITHIN_S)
    finally:
        following.cancel()


# over real sockets


@contextmanager
def node(running, name: str, number: int, job: str):
    """A daemon with one process."""
    with stream(running.grpc, name) as it:
        it.batch(batch(1, sample(1), number=number, job=job))
        it.until(1)
        yield it


def order_of(it: Stream):
    """The next order that a stream is told."""
    while True:
        orders = it.response().orders
        if orders:
            [order] = orders
            told = wire.order_from_wire(order.order)
            assert isinstance(told, CaptureOrder)
            return order.process_id, told


def ask(running, job: str, **body) -> list[dict]:
    answer = httpx.post(f"http://{running.http}/api/v1/jobs/{job}/captures", json=body, timeout=WITHIN_S)
    assert answer.status_code == 202, answer.text
    items: list[dict] = answer.json()["items"]
    return items


def about(running, capture_id: str) -> dict:
    found: dict = running.get(f"/api/v1/captures/{capture_id}/about").json()
    return found


def test_an_order_goes_to_its_node_and_its_capture_comes_back(running):
    with node(running, "n-order", 41, "ordered") as it:
        [said] = ask(running, "ordered", history_s=2.5, history_entries=100, tensors=True)
        process_id, told = order_of(it)
        assert process_id == f"{41:032x}"
        assert told == CaptureOrder(said["capture_id"], None, 2_500_000, 100, True, CaptureReason.ASKED)
        until(lambda: about(running, told.capture_id)["state"] == "sent", "it is known to be sent")
        bring(running.grpc, told.capture_id, 41, job="ordered", reason=CaptureReason.ASKED, tensors=True)
    found = about(running, told.capture_id)
    assert (found["state"], found["history_s"], found["tensors"], found["problem"]) == ("kept", 2.5, True, None)
    assert running.get(f"/api/v1/captures/{told.capture_id}").headers["content-encoding"] == "gzip"


def test_an_order_waits_for_a_node_that_is_away_and_is_told_again_until_it_is_answered(running):
    with node(running, "n-away", 42, "away"):
        pass
    [said] = ask(running, "away")
    for _ in range(2):
        with stream(running.grpc, "n-away") as it:
            assert order_of(it)[1].capture_id == said["capture_id"]
    gone = capture(said["capture_id"], 42, snapshot_bytes=None, reason=CaptureReason.ASKED, problem="it is not here")
    send(running.grpc, [hello(gone, process(42, "away"), "n-away")])
    [later] = ask(running, "away")
    with stream(running.grpc, "n-away") as it:
        assert order_of(it)[1].capture_id == later["capture_id"], "and not the one that was answered"
    found = about(running, said["capture_id"])
    assert (found["state"], found["problem"]) == ("failed", "it is not here")


def test_an_order_reaches_its_node_over_whichever_collector_has_its_stream(running, tmp_path):
    with (
        collector(tmp_path, f"--database=sqlite:///{running.database}") as other,
        node(other, "n-elsewhere", 43, "elsewhere") as it,
    ):
        [said] = ask(running, "elsewhere")
        assert order_of(it)[1].capture_id == said["capture_id"]
        bring(running.grpc, said["capture_id"], 43, job="elsewhere")
        assert about(other, said["capture_id"])["state"] == "kept"
        assert other.get(f"/api/v1/captures/{said['capture_id']}").status_code == 200


def test_a_large_capture_is_downloaded_without_lying_in_memory(running):
    one, snapshot = "e" * 32, os.urandom(40 << 20)
    bring(running.grpc, one, 44, snapshot=snapshot)
    before = memory_bytes(running)
    for accepted in ("gzip", "identity"):
        answer = httpx.get(
            f"http://{running.http}/api/v1/captures/{one}", headers={"accept-encoding": accepted}, timeout=60
        )
        assert answer.content == snapshot
    assert memory_bytes(running) < before + (16 << 20)
