"""NVML read again and again, in a thread a device that nobody joins and nobody waits for.

A call into a driver in trouble may never come back. Then its own device has no figures until it does; it is not asked a second time
meanwhile, and the others are read as ever. There is a thread for the library and one for each device, and never more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from allocscope.daemon.nvml import Nvml, NvmlRound
from allocscope.daemon.nvml_device import NvmlDevice
from allocscope.daemon.nvml_problems import LASTING, NvmlProblem, ProblemKind

LONGEST_PAUSE_S = 30.0
"""Between two attempts to begin with a library, or a driver, that is not there: they are further and further apart."""
MOST_KNOWN = 128
"""Devices that are remembered; of more, as where a virtual one gets a new UUID each time, those that went first are forgotten."""
GONE = NvmlProblem(ProblemKind.GONE, "NVML lists it no more")

_Answer = TypeVar("_Answer")


class _Asker(Generic[_Answer]):
    """Asks one thing again and again, in a daemon thread."""

    def __init__(
        self,
        name: str,
        ask: Callable[[], _Answer],
        *,
        pause_s: Callable[[], float],
        clock: Callable[[], float],
        stopping: threading.Event,
        changed: threading.Condition,
    ) -> None:
        self._name, self._ask, self._pause_s, self._clock = name, ask, pause_s, clock
        self._stopping, self._changed = stopping, changed
        self.began_s: float | None = None
        """Since when it waits for an answer; None: it does not."""
        self.answer: _Answer | None = None
        """The last one."""
        self.has_answered = False

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def waits_s(self) -> float:
        """For how long it has waited for its answer."""
        began_s = self.began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.began_s = self._clock()
            answer = self._ask()
            with self._changed:
                self.answer, self.began_s, self.has_answered = answer, None, True
                self._changed.notify_all()
            self._stopping.wait(self._pause_s())


class NvmlWatch:
    """What NVML tells, as new as it can be had."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        interval_s: float,
        timeout_s: float,
        clock: Callable[[], float],
        longest_pause_s: float = LONGEST_PAUSE_S,
        on_read: Callable[[float, bool], None] = lambda _seconds, _went_well: None,
    ) -> None:
        """`on_read`: a device was read, or the library could not be used, in so many seconds; from any thread."""
        self._nvml, self._interval_s, self._timeout_s, self._clock = nvml, interval_s, timeout_s, clock
        self._longest_pause_s, self._on_read = longest_pause_s, on_read
        self._hanging = NvmlProblem(ProblemKind.HANGS, f"NVML has not answered within {timeout_s:g} s")
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._library = self._new_asker("nvml", self._check, self._pause_s)
        self._devices: list[_Asker[tuple[NvmlDevice, ...]]] = []
        self._known: dict[str, NvmlDevice] = {}
        """Whole devices that were ever told, by UUID."""

    def start(self) -> None:
        """Begin to read."""
        self._library.start()

    def stop(self) -> None:
        """Read no more."""
        self._stopping.set()

    def wait_until_read(self, within_s: float) -> bool:
        """Until the library, and every device that it counts, has answered once; False: not in that time."""
        with self._changed:
            return self._changed.wait_for(self._has_read_all, within_s)

    def latest(self) -> NvmlRound:
        """What each device told last; without figures where it hangs, where the library fails, or where it is no more. For one thread."""
        hangs = self._library.waits_s() > self._timeout_s
        problem = self._hanging if hangs else self._nvml.problem
        told = list(self._told(None if hangs else problem))
        here: dict[str, NvmlDevice] = {}
        for device in sorted(told, key=lambda device: device.problem is not None):
            if device.uuid:  # told in two places while NVML's order changes: the one that can be read is the newer
                here.setdefault(device.uuid, device)
        gone = [] if problem else [d.without_figures(GONE) for uuid, d in self._known.items() if uuid not in here]
        self._known |= {uuid: device for uuid, device in here.items() if device.parent_uuid is None}
        for device in gone[: max(len(self._known) - MOST_KNOWN, 0)]:
            del self._known[device.uuid]
        unnamed = [device for device in told if not device.uuid]
        devices = sorted((*here.values(), *gone, *unnamed), key=lambda device: (device.index, device.uuid))
        return NvmlRound(tuple(devices), problem)

    def _told(self, problem: NvmlProblem | None) -> Iterator[NvmlDevice]:
        for index, asker in enumerate(self._devices[: self._nvml.count]):
            failing = problem or (self._hanging if asker.waits_s() > self._timeout_s else None)
            yield from self._nvml.without_figures(index, failing) if failing else asker.answer or ()

    def _has_read_all(self) -> bool:
        return self._library.has_answered and all(asker.has_answered for asker in self._devices[: self._nvml.count])

    def _check(self) -> None:
        began_s = self._clock()
        if self._nvml.check():
            self._on_read(self._clock() - began_s, False)
        while len(self._devices) < self._nvml.count:
            index = len(self._devices)
            asker = self._new_asker(f"nvml-{index}", partial(self._read, index), lambda: self._interval_s)
            self._devices.append(asker)
            asker.start()

    def _read(self, index: int) -> tuple[NvmlDevice, ...]:
        began_s = self._clock()
        told = self._nvml.read(index)
        if told:
            went_well = all(device.problem is None or device.problem.kind in LASTING for device in told)
            self._on_read(self._clock() - began_s, went_well)
        return told

    def _pause_s(self) -> float:
        pause_s: float = self._interval_s * 2 ** min(self._nvml.failures, 16)
        return min(pause_s, max(self._longest_pause_s, self._interval_s))

    def _new_asker(self, name: str, ask: Callable[[], _Answer], pause_s: Callable[[], float]) -> _Asker[_Answer]:
        return _Asker(name, ask, pause_s=pause_s, clock=self._clock, stopping=self._stopping, changed=self._changed)
