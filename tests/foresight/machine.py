"""A made-up process on a made-up device: PyTorch's allocator, as the simulator has it, asked at moments that the caller tells."""

from __future__ import annotations

from collections.abc import Callable

from allocscope.allocator.recording import Recording
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.snapshot import TraceEntry

START_US = 1_700_000_000_000_000
OUTSIDE_BYTES = 512 << 20
"""What the process itself uses beside its allocator."""

Neighbour = Callable[[float], int]
"""What other processes want of the device, bytes, by the seconds since the start; they get no more than is free."""


class Machine:
    """Asked for memory as the simulator is, at the moment that was told last."""

    def __init__(self, total_bytes: int, neighbour: Neighbour, conf: str = "") -> None:
        self.conf = conf
        self.total_bytes = total_bytes
        self._neighbour = neighbour
        self._settings = parse_settings(conf)
        self._simulator = Simulator(self._settings, Device(total_bytes), trace=True)
        self._trace: list[TraceEntry] = []
        self._others: list[tuple[int, int]] = []
        self._time_us = START_US
        self.at(0.0)

    def at(self, elapsed_s: float) -> None:
        """What follows happens then."""
        self._stamp()
        self._time_us = START_US + round(elapsed_s * 1e6)
        device = self._simulator.device
        before = self._others[-1][1] if self._others else 0
        others = min(OUTSIDE_BYTES + self._neighbour(elapsed_s), max(before, self.total_bytes - device.used_bytes))
        if others != before:
            self._others.append((self._time_us, others))
        device.other_bytes = others

    def malloc(self, request_bytes: float, stream: int = 0) -> int:
        """Its address. OutOfMemoryError: as PyTorch would."""
        return self._simulator.malloc(int(request_bytes), stream)

    def free(self, address: int) -> None:
        """What `malloc` gave."""
        self._simulator.free(address)

    def empty_cache(self) -> None:
        """Gives back what lies free in whole segments."""
        self._simulator.empty_cache()

    @property
    def allocated_peak_bytes(self) -> int:
        """The most that was live."""
        return self._simulator.stats()["allocated_bytes.all.peak"]

    @property
    def died(self) -> bool:
        """Whether a request failed: it was the last."""
        trace = self._simulator.trace
        return bool(trace) and trace[-1].action == "oom"

    def recording(self, name: str, end_s: float) -> Recording:
        """All of it until then, as a probe could have seen it; of one that died, until its end."""
        self._stamp()
        return Recording(
            name=name,
            start_us=START_US,
            end_us=self._time_us if self.died else START_US + round(end_s * 1e6),
            device_index=0,
            device_total_bytes=self.total_bytes,
            other_used=tuple(self._others),
            settings=self._settings,
            conf=self.conf,
            trace=tuple(self._trace),
            segments=(),
        )

    def _stamp(self) -> None:
        told = self._simulator.trace
        self._trace.extend(entry._replace(time_us=self._time_us) for entry in told[len(self._trace) :])
