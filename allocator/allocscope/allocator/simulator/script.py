"""The requests of a history, ready to be made under any settings, here or in another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator.ask import Outcome, ask_again
from allocscope.allocator.simulator.asked import Asked, OtherUse, Packed
from allocscope.allocator.simulator.device import Device
from allocscope.allocator.simulator.simulator import Simulator

_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Script:
    """Requests, and the device that they are made on; bytes. It can be pickled, and is small for what it holds."""

    asked: Packed
    version: str
    """Of PyTorch, by whose rules."""
    device_total_bytes: int
    other_used: OtherUse
    memory_fraction: float | None = None
    """What set_per_process_memory_fraction was called with; None: nobody knows, and so the settings' own counts."""

    def replay(self, conf: str, progress: Callable[[int], None] | None = None) -> Outcome:
        """What they come to under these settings; `progress` is told now and then how many were made.

        Where PyTorch itself would be corrupt under them the replay ends (`Outcome.undefined`). SettingsError: they cannot be read.
        """
        settings = parse_settings(conf)
        device = Device(self.device_total_bytes)
        simulator = Simulator(settings, device, version=self.version, memory_fraction=self.memory_fraction)
        asked: Iterable[Asked] = self.asked if progress is None else _watched(self.asked, progress)
        return ask_again(asked, simulator, self.other_used, undefined_ends=True)


def _watched(asked: Packed, progress: Callable[[int], None]) -> Iterator[Asked]:
    left = iter(asked)
    for made in range(0, len(asked), _CHUNK):
        progress(made)
        yield from islice(left, _CHUNK)
    progress(len(asked))
