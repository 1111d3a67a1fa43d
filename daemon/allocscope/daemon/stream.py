"""What is to be told to one process on its stream. Bounded."""

from __future__ import annotations

import asyncio

from allocscope.daemon.node import Attached
from allocscope.daemon.peers import Peer
from allocscope.model import wire
from allocscope.model.orders import Order
from allocscope.proto.v1.probe_service_pb2 import AttachResponse

ORDERS_KEPT = REFUSALS_KEPT = 32


class Stream:
    """One process's stream."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.attached: Attached | None = None
        self.woken = asyncio.Event()
        self.sent = 0
        self._acknowledged = self._told = 0
        self._orders: list[Order] = []
        self._refused: list[str] = []

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this number is on disk, or refused."""
        self._acknowledged = max(self._acknowledged, sequence)
        self.woken.set()

    def order(self, order: Order) -> None:
        """Tell the process to do something; the newest orders count."""
        self._orders = [*self._orders, order][-ORDERS_KEPT:]
        self.woken.set()

    def refuse(self, text: str) -> None:
        """Tell the process what was refused."""
        if len(self._refused) < REFUSALS_KEPT:
            self._refused.append(text)
        self.woken.set()

    @property
    def is_settled(self) -> bool:
        """Whether everything that came was acknowledged."""
        return self._told >= self.sent

    def take(self) -> AttachResponse | None:
        """What there is to tell now."""
        self.woken.clear()
        if self._acknowledged == self._told and not self._orders and not self._refused:
            return None
        response = AttachResponse(
            acknowledged_sequence=self._acknowledged,
            orders=[wire.order_to_wire(order) for order in self._orders],
            refused=self._refused,
        )
        self._told, self._orders, self._refused = self._acknowledged, [], []
        return response
