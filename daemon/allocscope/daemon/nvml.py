"""The NVML library: begun with, ended and begun with anew where it has become useless; and its devices, read each for itself.

Reading never raises. Calls about different devices may run in different threads, and any of them may hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from allocscope.daemon.nvml_device import NvmlDevice, read_device
from allocscope.daemon.nvml_problems import CURED_BY_A_NEW_START, LIBRARY, NvmlProblem, ProblemKind, problem_of

MOST_DEVICES = 64
"""Of one node; more are not read."""


@dataclass(frozen=True, slots=True)
class NvmlRound:
    """All devices as they were last read."""

    devices: tuple[NvmlDevice, ...] = ()
    problem: NvmlProblem | None = None
    """Why the library cannot be used."""

    def problems(self) -> dict[str, NvmlProblem]:
        """What is wrong, by where; what is so on purpose is not. Where the library fails, that is all that is told."""
        if self.problem:
            return {LIBRARY: self.problem} if self.problem.kind is not ProblemKind.NOT_READ else {}
        return {f"device {d.index} ({d.uuid or 'no UUID'})": d.problem for d in self.devices if d.problem}


NEVER_READ = NvmlProblem(ProblemKind.NOT_READ, "NVML has not been read yet")
SWITCHED_OFF = NvmlRound(problem=NvmlProblem(ProblemKind.NOT_READ, "NVML is switched off"))


class Nvml:
    """Reads by the pynvml module, or a fake of it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._pynvml: Any = None
        self._lock = threading.Lock()
        self._calls = 0
        """About devices, that have not come back."""
        self._last: dict[int, tuple[NvmlDevice, ...]] = {}
        """What was told last in each place; a device first, then its instances."""
        self.count = 0
        """Places in NVML's order."""
        self.problem: NvmlProblem | None = NEVER_READ
        """Of the library, by the last check."""
        self.failures = 0
        """Checks in a row after which there was nothing to read."""

    def check(self) -> NvmlProblem | None:
        """Begin with the library where that is not done or does not hold, and count its devices; what is wrong. For one thread."""
        try:
            nvml = self._pynvml
            if nvml is None or self.problem or self._is_useless():
                nvml = self._begin()
            self.count = min(nvml.nvmlDeviceGetCount(), MOST_DEVICES)
        except Exception as error:  # noqa: BLE001 (a missing library, driver or symbol: types of many modules)
            self.problem = problem_of(error)
        else:
            self.problem = None
        self.failures = self.failures + 1 if self.problem or self._is_useless() else 0
        return self.problem

    def read(self, index: int) -> tuple[NvmlDevice, ...]:
        """The device in this place and its instances, or what is known of them and why there is no more; empty: there is none."""
        if index >= self.count:
            return ()
        with self._lock:
            nvml = self._pynvml
            if nvml is None:  # a new beginning is under way, where nothing is wrong by the last check
                return self.without_figures(index, self.problem) if self.problem else self._last.get(index, ())
            self._calls += 1
        try:
            told = tuple(self._with_total(device) for device in read_device(nvml, index))
        except Exception as error:  # noqa: BLE001 (not all of pynvml's errors are NVMLErrors; one device hides no other)
            told = self.without_figures(index, problem_of(error))
        finally:
            with self._lock:
                self._calls -= 1
        self._last[index] = told
        return told

    def without_figures(self, index: int, problem: NvmlProblem) -> tuple[NvmlDevice, ...]:
        """What stays known of the device in this place and of its instances; one without a UUID where that was never told."""
        known = self._last.get(index) or (NvmlDevice("", index),)
        return tuple(device.without_figures(problem) for device in known)

    def driver_version(self) -> str | None:
        """None: not told. May hang, as all calls."""
        return self._told("nvmlSystemGetDriverVersion")

    def library_version(self) -> str | None:
        """None: not told. May hang, as all calls."""
        return self._told("nvmlSystemGetNVMLVersion")

    def _told(self, call: str) -> str | None:
        try:
            return str(getattr(self._pynvml, call)())
        except Exception:  # noqa: BLE001 (the same)
            return None

    def _begin(self) -> Any:
        """Anew, where it was begun with before and no call is under way: the library opens the devices' files only at its beginning."""
        pynvml = self._load()
        with self._lock:
            was = self._pynvml
            if was is not None and self._calls:
                return was
            self._pynvml = None
        if was is not None:
            with suppress(Exception):
                was.nvmlShutdown()
        pynvml.nvmlInit()
        self._pynvml = pynvml
        return pynvml

    def _is_useless(self) -> bool:
        """Whether every device fails in a way that a new beginning may cure."""
        firsts = [told[0] for index in range(self.count) if (told := self._last.get(index))]
        return bool(firsts) and all(d.problem and d.problem.kind in CURED_BY_A_NEW_START for d in firsts)

    def _with_total(self, device: NvmlDevice) -> NvmlDevice:
        """A device keeps its size where only its figures of the moment are not told."""
        if device.total_bytes is not None or device.in_mig_mode:
            return device
        known = [other for other in self._last.get(device.index, ()) if other.uuid == device.uuid]
        return replace(device, total_bytes=known[0].total_bytes) if known else device


def load_pynvml() -> Any:
    """The binding, from nvidia-ml-py."""
    import pynvml

    return pynvml
