"""What can be wrong with NVML, or with one of its devices: of which kind, in which words, and what helps.

A kind is a fixed word: metrics, alerts and the wire carry it. The text is the driver's own, for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LIBRARY = "library"
"""Where a problem is that is not one device's."""
WELL_AFTER_S = 10.0
"""A problem is over once it has not been seen for so long; one that comes and goes is told once."""


class ProblemKind(StrEnum):
    """Of which kind a problem is."""

    NO_BINDING = "no_binding"
    NO_LIBRARY = "no_library"
    NO_DRIVER = "no_driver"
    DRIVER_MISMATCH = "driver_mismatch"
    OLD_DRIVER = "old_driver"
    NO_PERMISSION = "no_permission"
    NOT_SUPPORTED = "not_supported"
    LOST = "lost"
    GONE = "gone"
    NEEDS_RESET = "needs_reset"
    NO_POWER = "no_power"
    HANGS = "hangs"
    UNKNOWN = "unknown"
    ERROR = "error"
    NOT_AVAILABLE = "not_available"
    NONSENSE = "nonsense"
    NO_PROCESSES = "no_processes"
    NO_PROCESS_MEMORY = "no_process_memory"
    NOT_READ = "not_read"


@dataclass(frozen=True, slots=True)
class NvmlProblem:
    """What is wrong."""

    kind: ProblemKind
    text: str

    def __str__(self) -> str:
        return self.text


_OF_CODE = {
    3: ProblemKind.NOT_SUPPORTED,
    4: ProblemKind.NO_PERMISSION,
    8: ProblemKind.NO_POWER,
    9: ProblemKind.NO_DRIVER,
    10: ProblemKind.HANGS,
    12: ProblemKind.NO_LIBRARY,
    13: ProblemKind.OLD_DRIVER,
    15: ProblemKind.LOST,
    16: ProblemKind.NEEDS_RESET,
    18: ProblemKind.DRIVER_MISMATCH,
    25: ProblemKind.OLD_DRIVER,
    28: ProblemKind.LOST,
    999: ProblemKind.UNKNOWN,
}
"""By nvmlReturn_t (nvml.h, driver 580). What is not here is an "error", and its text tells which."""

CURED_BY_A_NEW_START = frozenset(
    {
        ProblemKind.NO_DRIVER,
        ProblemKind.DRIVER_MISMATCH,
        ProblemKind.NO_PERMISSION,
        ProblemKind.UNKNOWN,
        ProblemKind.ERROR,
    }
)
"""Where every device has one of these, the library is ended and begun with anew; it opens its device files only then."""

LASTING = frozenset(
    {
        ProblemKind.NOT_SUPPORTED,
        ProblemKind.NOT_AVAILABLE,
        ProblemKind.NO_PROCESSES,
        ProblemKind.NO_PROCESS_MEMORY,
    }
)
"""What a device, or a driver, is, rather than what has befallen it: nothing has failed."""

REMEDIES: Mapping[ProblemKind, str] = {
    ProblemKind.NO_BINDING: "install nvidia-ml-py where the daemon runs, as the extra `daemon` of Allocscope does",
    ProblemKind.NO_LIBRARY: "install NVIDIA's driver; in a container start it with the NVIDIA runtime and"
    " NVIDIA_DRIVER_CAPABILITIES=utility; on a node without GPUs: --nvml false",
    ProblemKind.NO_DRIVER: "load the kernel module (modprobe nvidia); `dmesg | grep -i nvrm` tells why it is not loaded",
    ProblemKind.DRIVER_MISMATCH: "the driver was updated and its kernel module was not: reload the module, or reboot",
    ProblemKind.OLD_DRIVER: "a newer driver tells more; from 510 on the driver's own part of the memory",
    ProblemKind.NO_PERMISSION: "let the daemon open /dev/nvidiactl and /dev/nvidia*: by group, or by the container's devices",
    ProblemKind.NOT_SUPPORTED: "nothing: this device does not tell it; total and free are then what the jobs see",
    ProblemKind.LOST: "it has fallen off the bus: look for Xid in `dmesg`, drain the node and reboot it",
    ProblemKind.GONE: "NVML told of it before and does so no more: look for Xid in `dmesg`; a restart of the daemon forgets it",
    ProblemKind.NEEDS_RESET: "end the jobs on it, then nvidia-smi --gpu-reset -i INDEX",
    ProblemKind.NO_POWER: "connect the device's power cables",
    ProblemKind.HANGS: "the driver does not answer: look for Xid and hung tasks in `dmesg`; it is asked again as soon as it answers",
    ProblemKind.UNKNOWN: "in a container, after `systemctl daemon-reload` on the node: start the container again, and give it its"
    " devices by CDI; else look for Xid in `dmesg`",
    ProblemKind.ERROR: "`nvidia-smi` and `dmesg | grep -i nvrm` may tell more",
    ProblemKind.NOT_AVAILABLE: "nothing: the driver says that it does not know; total and free are then what the jobs see",
    ProblemKind.NONSENSE: "figures that cannot be are left out; a newer driver may tell right ones",
    ProblemKind.NO_PROCESSES: "run the daemon in the node's pid namespace (hostPID: true); some virtual GPUs never tell",
    ProblemKind.NO_PROCESS_MEMORY: "nothing: the driver does not tell it here (WDDM, some virtual GPUs); jobs with a probe tell"
    " their own",
    ProblemKind.NOT_READ: "nothing: it is on purpose, or has just begun",
}
"""What to do about each."""


def problem_of(error: Exception) -> NvmlProblem:
    """What an exception of pynvml says; not all of them are NVMLErrors."""
    if isinstance(error, ModuleNotFoundError):
        return NvmlProblem(ProblemKind.NO_BINDING, str(error))
    code: Any = getattr(error, "value", None)
    kind = _OF_CODE.get(code) if isinstance(code, int) else None
    if kind is None and type(error).__name__ == "NVMLLibraryMismatchError":
        kind = ProblemKind.OLD_DRIVER
    return NvmlProblem(kind or ProblemKind.ERROR, str(error) or type(error).__name__)


class ProblemNews:
    """Which problems begin, and where all is well again: each is told once, though its text changes, or it comes and goes."""

    def __init__(self) -> None:
        self._seen_s: dict[tuple[str, ProblemKind], float] = {}

    def step(self, problems: Mapping[str, NvmlProblem], now_s: float) -> tuple[dict[str, NvmlProblem], list[str]]:
        """Of all problems that there are now, by where, those that begin; and where there are none any more.

        While the library fails, nothing is known of the devices, and so none is well again.
        """
        begun = {where: problem for where, problem in problems.items() if (where, problem.kind) not in self._seen_s}
        self._seen_s |= {(where, problem.kind): now_s for where, problem in problems.items()}
        if LIBRARY in problems:
            return begun, []
        lately = {where for (where, _), seen_s in self._seen_s.items() if now_s - seen_s < WELL_AFTER_S}
        well = sorted({where for where, _ in self._seen_s} - lately)
        self._seen_s = {key: seen_s for key, seen_s in self._seen_s.items() if key[0] in lately}
        return begun, well
