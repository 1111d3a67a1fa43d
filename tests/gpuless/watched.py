"""A job in the rig with the real probe in it, and a stand-in for its daemon: what the one does, and what the other gets of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from allocscope.model import BlockMap, Intervals, Sample
from tests.gpuless.rig import Rig, Shell
from tests.probe.receiver import Receiver

WORKLOADS = Path(__file__).with_name("workloads.py").read_text()
START = """
import sys, time, logging, threading
from allocscope import probe
from allocscope.probe import app, sampler
sampler.SHORTEST_MAP_INTERVAL_S, sampler.MAP_COST_FACTOR, app.LOOK_INTERVAL_S = 0.1, 1, 0.02  # so that tests need not wait long
probe.start(job="watched")
"""
OFTEN = Intervals(sample_us=100_000, block_map_us=200_000)


_Told = TypeVar("_Told", Sample, BlockMap)


class Watched:
    """One job, quiet between two calls of it."""

    def __init__(self, rig: Rig, job: Shell, receiver: Receiver, folder: Path) -> None:
        self.rig, self.job, self.receiver, self.folder = rig, job, receiver, folder
        """`folder`: where it leaves captures."""

    def __call__(self, code: str) -> Any:
        return self.job(code)

    def look_often(self) -> None:
        """Once it has a first device."""
        self.receiver.wait_for(self.receiver.hellos)
        self.receiver.say(orders=(OFTEN,))

    def sample(self) -> Sample:
        """The next one that is wholly of now."""
        return self._next(self.receiver.samples)

    def block_map(self) -> BlockMap:
        """The next one that is wholly of now."""
        return self._next(self.receiver.block_maps)

    def _next(self, told: Callable[[], list[_Told]]) -> _Told:
        now_us = time.time_ns() // 1000
        self.receiver.wait_for(lambda: [each for each in told() if each.time_us > now_us])
        return next(each for each in told() if each.time_us > now_us)

    def stats(self, device: int = 0) -> dict[str, Any]:
        """As torch tells them."""
        told: dict[str, Any] = self.job(f"torch.cuda.memory_stats({device})")
        return told

    def segments(self) -> list[dict[str, Any]]:
        """As torch tells them."""
        told: list[dict[str, Any]] = self.job("torch.cuda.memory_snapshot(include_traces=False)")
        return told


@contextmanager
def watched(
    rig: Rig, tmp_path: Path, environ: Mapping[str, str] | None = None, *, captures: bool = True
) -> Iterator[Watched]:
    """A job that has the workloads and a probe; nothing of CUDA is initialized yet."""
    socket, folder = tmp_path / "d.sock", tmp_path / "captures"
    if captures:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1733)
    told = {"ALLOCSCOPE_SOCKET": str(socket), **(environ or {})}
    with Receiver(socket) as receiver, rig.shell(told) as job:
        job(WORKLOADS)
        job(START)
        yield Watched(rig, job, receiver, folder)
