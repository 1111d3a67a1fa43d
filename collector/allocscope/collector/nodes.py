"""Which daemons are there: one stream a node, its clock, and when it was heard last. Used on the event loop only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

CLOCK_MEMORY_S = 60.0
"""A request may have waited on the way (this collector makes daemons wait), so the least delay of so long counts."""
CLOCKS_DISAGREE_S = 30.0
"""Said in the log once it is reached, and again once it is over. Nothing is thrown away for it."""


class NodeTaken(Exception):  # noqa: N818  (an error is named for what is wrong)
    """Another daemon reports under this node name at this moment."""

    def __init__(self, node: str, holder: str, asker: str) -> None:
        super().__init__(
            f"node {node!r} is reported by daemon {holder}, whose stream is open, so daemon {asker} may not: "
            "two daemons have one node name (give one of them another: --node, ALLOCSCOPE_NODE), or a spool was copied"
        )
        self.node, self.holder, self.asker = node, holder, asker


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a daemon says it is."""

    node: str
    daemon_id: str
    version: str
    metrics_address: str | None


@dataclass(slots=True, eq=False)
class NodeState:
    """A node as it is known since this process started."""

    hello: Hello
    connected: bool
    last_seen_us: int
    clock_offset_us: int | None = None
    """Sent − received: how far the node's clock is ahead of ours, less the travel (the least that was met lately)."""
    clock_measured_us: int = 0
    """When that was met, by our clock."""
    close: Callable[[], None] | None = None
    """Ends the stream that is open."""

    @property
    def clocks_disagree(self) -> bool:
        """Whether graphs of this node and others are visibly apart."""
        return self.clock_offset_us is not None and abs(self.clock_offset_us) >= CLOCKS_DISAGREE_S * 1e6


class Nodes:
    """The nodes of this collector."""

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}

    def all(self) -> tuple[NodeState, ...]:
        """Every node that was seen, by name."""
        return tuple(state for _, state in sorted(self._states.items()))

    def get(self, node: str) -> NodeState | None:
        """One node, if it was seen."""
        return self._states.get(node)

    def attach(self, hello: Hello, now_us: int, close: Callable[[], None]) -> NodeState:
        """A daemon's stream begins; an older one of the same daemon (half open, or restarted) is closed."""
        old = self._states.get(hello.node)
        if old and old.connected:
            if old.hello.daemon_id != hello.daemon_id:
                raise NodeTaken(hello.node, old.hello.daemon_id, hello.daemon_id)
            log.info("stream replaced", node=hello.node, daemon_id=hello.daemon_id)
            old.connected = False
            if old.close:
                old.close()
        state = NodeState(hello, True, now_us, close=close)
        self._states[hello.node] = state
        return state

    def detach(self, state: NodeState) -> None:
        """A daemon's stream ended."""
        state.connected, state.close = False, None

    def forget(self, state: NodeState) -> None:
        """It was never one of this collector's."""
        if self._states.get(state.hello.node) is state:
            del self._states[state.hello.node]

    def heard(self, state: NodeState, *, sent_us: int, now_us: int) -> None:
        """Something came."""
        disagreed = state.clocks_disagree
        state.last_seen_us = now_us
        _measure(state, sent_us, now_us)
        if state.clocks_disagree and not disagreed:
            log.warning(
                "a node's clock disagrees with this machine's; its times are kept as it sends them",
                node=state.hello.node,
                offset_s=round((state.clock_offset_us or 0) / 1e6, 1),
            )
        elif disagreed and not state.clocks_disagree:
            log.info("a node's clock agrees again", node=state.hello.node)


def _measure(state: NodeState, sent_us: int, now_us: int) -> None:
    """A request that does not say when it was sent tells nothing of the clock."""
    if not sent_us:
        return
    offset_us = sent_us - now_us
    best_us, forgotten = state.clock_offset_us, now_us - state.clock_measured_us > CLOCK_MEMORY_S * 1e6
    if best_us is None or offset_us >= best_us or forgotten:
        state.clock_offset_us, state.clock_measured_us = offset_us, now_us
