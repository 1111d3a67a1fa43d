"""Jobs for a daemon that is measured, all in one process so that they cost the machine little: real recordings over real probes' streams.

python -m tests.bench.daemon_feeder play SOCKET START_AT SECONDS SPEED     sixteen jobs on eight devices, for SECONDS of the wall's clock
python -m tests.bench.daemon_feeder churn SOCKET COUNT                     jobs that begin, say a little, and end, one after the other
"""

from __future__ import annotations

import heapq
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count

from allocscope.allocator.player import Player, Seen
from allocscope.allocator.recording import Recording, read_recording
from allocscope.model import AllocatorRef, BlockMap, Device, Event, EventKind, Process, Sample
from allocscope.probe.uplink import Uplink
from tests.e2e.processes import recording

RUNS = (
    "islands_grow-4-5518",
    "varlen-1-2985",
    "leak-1-3771",
    "leak_small-1-3570",
    "longtail-1-7723",
    "neighbour_calm-2-7422",
    "steady-1-2216",
    "streams-2-3890",
)
"""Each lasts longer than ten minutes, which are played again and again, and is played by two jobs."""
LAP_US = 600_000_000
DEVICES, JOBS = 8, 16
SAMPLES_OF_A_SHORT_JOB = 3
FLUSH_S = 30.0


class Job:
    """One job, as its daemon sees it."""

    def __init__(self, number: int, socket_path: str) -> None:
        self._recording = _recording(RUNS[number % len(RUNS)])
        index = number % DEVICES
        device = Device(f"GPU-{index}", index, "NVIDIA H200", self._recording.device_total_bytes)
        self.process = Process(
            uuid.uuid4().hex,
            f"job-{number}",
            os.getpid(),
            socket.gethostname(),
            time.time_ns() // 1000,
            rank=0,
            world_size=1,
            allocator_conf=self._recording.conf,
            devices=(device,),
        )
        self._ref = AllocatorRef(self.process.process_id, device.uuid)
        self._uplink = Uplink(socket_path, self.process)
        self._uplink.start()

    def lap(self) -> list[Seen]:
        """What its probe sees in the recording's first ten minutes."""
        player, start_us = Player(self._recording, seed=1, allocator=self._ref), self._recording.start_us
        shown = (replace(seen, time_us=seen.time_us - start_us) for seen in player)
        return [seen for seen in shown if seen.time_us < LAP_US and not isinstance(seen, Event)]

    def hand_on(self, seen: Seen, time_us: int) -> None:
        """As its probe does."""
        placed = replace(seen, sequence=self._uplink.next_sequence(), time_us=time_us)
        match placed:
            case Sample():
                self._uplink.sample(self._ref, placed)
            case BlockMap():
                self._uplink.block_map(self._ref, placed)
            case Event():
                self._uplink.event(placed)

    def end(self) -> None:
        """In order."""
        self.hand_on(
            Event(self.process.process_id, 0, 0, EventKind.STOPPED),
            time.time_ns() // 1000,
        )
        left = self._uplink.close(FLUSH_S)
        assert not left, f"{left} were not acknowledged"


@cache
def _recording(name: str) -> Recording:
    return read_recording(recording(name))


def play(socket_path: str, start_at_s: float, seconds: float, speed: float) -> None:
    """Until the time is over; then all end."""
    jobs = [Job(number, socket_path) for number in range(JOBS)]
    for due_s, job, seen in heapq.merge(*(_moments(job, speed) for job in jobs), key=lambda moment: moment[0]):
        if due_s > seconds:
            break
        threading.Event().wait(max(start_at_s + due_s - time.time(), 0))
        job.hand_on(seen, round((start_at_s + due_s * speed) * 1e6))
    for job in jobs:
        job.end()


def _moments(job: Job, speed: float) -> Iterator[tuple[float, Job, Seen]]:
    lap = job.lap()
    for turn in count():
        for seen in lap:
            yield (turn * LAP_US + seen.time_us) / 1e6 / speed, job, seen


def churn(socket_path: str, jobs: int) -> None:
    """One after the other."""
    for number in range(jobs):
        job = Job(number, socket_path)
        for _ in range(SAMPLES_OF_A_SHORT_JOB):
            job.hand_on(Sample(0, 0, allocated_bytes=1 << 30, reserved_bytes=2 << 30), time.time_ns() // 1000)
        job.end()


if __name__ == "__main__":
    what, path, *numbers = sys.argv[1:]
    if what == "play":
        play(path, *map(float, numbers))
    else:
        churn(path, int(numbers[0]))
