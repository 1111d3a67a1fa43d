"""Orders to take a capture: each is answered, if only with why there is none."""

from __future__ import annotations

import pytest

from allocscope.daemon import capture_orders
from allocscope.daemon.capture_orders import CaptureOrders, Ordered
from allocscope.model import Capture, CaptureOrder, CaptureReason
from tests.daemon.capture_fakes import ID, note
from tests.daemon.fakes import Clock, process

A, B = "a" * 32, "b" * 32


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def orders(clock):
    return CaptureOrders(clock)


def ids(orders: CaptureOrders) -> list[str]:
    return [ordered.order.capture_id for ordered in orders]


def test_an_order_waits_for_its_process_until_that_leaves_a_note(orders):
    order = CaptureOrder(ID)
    assert orders.add(A, order)
    assert orders.add(A, order)
    assert orders.add(B, CaptureOrder("d" * 32))
    assert orders.of(A) == [order]
    orders.noted(note(process(), "e" * 32))
    orders.noted(note(process("b"), ID))
    assert ids(orders) == [ID, "d" * 32]
    orders.noted(note(process(), ID))
    assert (ids(orders), orders.of(A)) == (["d" * 32], [])


def test_too_many_are_refused(orders, monkeypatch):
    monkeypatch.setattr(capture_orders, "MOST_ORDERS", 2)
    assert [orders.add(A, CaptureOrder(letter * 32)) for letter in "cdec"] == [True, True, False, True]


@pytest.mark.parametrize(
    ("history_us", "patience_s", "told"), [(None, 300, "5 min"), (20_000_000, 320, "5 min"), (10**15, 3900, "65 min")]
)
def test_a_silent_process_is_given_time_and_then_up(orders, clock, history_us, patience_s, told):
    orders.add(A, CaptureOrder(ID, history_us=history_us))
    (ordered,) = orders
    clock.now_s += patience_s
    assert orders.problem(ordered, is_gone=False) is None
    clock.now_s += 1
    assert orders.problem(ordered, is_gone=False) == (
        f"the process left no capture within {told} of the order: it may hang in a call, or may not write to the"
        " folder for captures beside its daemon's socket (its log says so)"
    )


def test_a_process_that_is_gone_is_not_waited_for(orders):
    orders.add(A, CaptureOrder(ID, device_uuid="GPU-7", tensors=True, reason=CaptureReason.FORECAST))
    (ordered,) = orders
    problem = "the process is not on its node any more, or has no probe that takes orders"
    assert orders.problem(ordered, is_gone=True) == problem
    assert ordered.answer(problem, 5) == Capture(
        ID, A, 5, CaptureReason.FORECAST, device_uuid="GPU-7", tensors=False, problem=problem
    )
    orders.settle(ordered)
    orders.settle(Ordered(A, CaptureOrder("f" * 32), 1))
    assert ids(orders) == []
