"""Orders to take a capture. Each is kept until its process leaves a note, or it is known that none will come: somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from allocscope.model.captures import Capture, CaptureNote
from allocscope.model.figures import duration
from allocscope.model.orders import CaptureOrder

MOST_ORDERS = 256
ANSWER_WITHIN_S = 300.0
"""After the history that is to be recorded first; the process may be in a long call that lets no other thread run."""
LONGEST_HISTORY_S = 3600.0
"""What an order may ask for beyond is not waited for."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order that is not answered yet."""

    process_id: str
    order: CaptureOrder
    at_s: float
    """When it came, monotonic."""

    @property
    def patience_s(self) -> float:
        """How long its answer is waited for."""
        return ANSWER_WITHIN_S + min((self.order.history_us or 0) / 1e6, LONGEST_HISTORY_S)

    def answer(self, problem: str, time_us: int) -> Capture:
        """That there is no snapshot, and why."""
        return Capture(
            capture_id=self.order.capture_id,
            process_id=self.process_id,
            time_us=time_us,
            reason=self.order.reason,
            device_uuid=self.order.device_uuid,
            tensors=False,
            problem=problem,
        )


class CaptureOrders:
    """By capture id. Used on the event loop alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds, monotonic."""
        self._clock = clock
        self._ordered: dict[str, Ordered] = {}

    def __iter__(self) -> Iterator[Ordered]:
        return iter(list(self._ordered.values()))

    def add(self, process_id: str, order: CaptureOrder) -> bool:
        """False: there are too many. One that comes again is the same."""
        if len(self._ordered) >= MOST_ORDERS and order.capture_id not in self._ordered:
            return False
        self._ordered.setdefault(order.capture_id, Ordered(process_id, order, self._clock()))
        return True

    def of(self, process_id: str) -> list[CaptureOrder]:
        """What a process that comes on a new stream is to be told, since it may not know it."""
        return [ordered.order for ordered in self if ordered.process_id == process_id]

    def noted(self, note: CaptureNote) -> None:
        """A process left a note."""
        ordered = self._ordered.get(note.capture.capture_id)
        if ordered is not None and ordered.process_id == note.process.process_id:
            self.settle(ordered)

    def settle(self, ordered: Ordered) -> None:
        """It is answered."""
        self._ordered.pop(ordered.order.capture_id, None)

    def problem(self, ordered: Ordered, *, is_gone: bool) -> str | None:
        """Why no answer will come; None: it may."""
        if is_gone:
            return "the process is not on its node any more, or has no probe that takes orders"
        if self._clock() - ordered.at_s > ordered.patience_s:
            return (
                f"the process left no capture within {duration(ordered.patience_s)} of the order: it may hang in a call, or may"
                " not write to the folder for captures beside its daemon's socket (its log says so)"
            )
        return None
