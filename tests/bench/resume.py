"""What a collector's start over a full database costs, beside what it cost to follow the same jobs as they ran.

The shipped recordings, four jobs of each, a quarter of an hour: seven of twelve run out of memory, and each begins anew where it ended. They
are stored in SQLite as they come, a batch of sixteen jobs a second, and followed: that is the live cost, storing left out. Then the
collector is gone, and another one resumes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import allocscope.cli
from allocscope.allocator.player import Player
from allocscope.allocator.recording import Recording, read_recording
from allocscope.collector.fleet import Fleet
from allocscope.collector.records import alert_record
from allocscope.collector.resume import resume
from allocscope.model import AllocatorRef, BlockMap, Device, Event, Process, Sample, chunks
from allocscope.storage.records import NodeBatch
from allocscope.storage.repository import Repository
from allocscope.storage.sql import open_repository
from tests.bench.figures import Figure

ROUNDS, EACH, SECONDS, OF_NODE = 3, 4, 900, 16
START_US, S = 1_800_000_000_000_000, 1_000_000
RETIRE_AFTER_US = 300 * S
RECORDINGS = Path(allocscope.cli.__path__[0]) / "recordings"


def figures() -> Iterator[Figure]:
    """CPU time of one thread."""
    ratios, micros, live_micros = [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="as-") as folder:
            repository = open_repository(f"sqlite:///{Path(folder) / 'c.db'}")
            samples, live_s = _follow(repository)
            began = time.thread_time()
            fleet = Fleet(retire_after_us=RETIRE_AFTER_US)
            resume(repository, fleet, now_us=START_US + SECONDS * S, retire_after_us=RETIRE_AFTER_US)
            resume_s = time.thread_time() - began
            repository.close()
        assert any(fleet.gathering.standing()), "nothing fires"
        ratios.append(resume_s / live_s)
        micros.append(1e6 * resume_s / samples)
        live_micros.append(1e6 * live_s / samples)
    yield Figure("resuming / following live, of the same samples", ratios, "")
    yield Figure("resuming", micros, "µs a sample")
    yield Figure("following live", live_micros, "µs a sample")


def _follow(repository: Repository) -> tuple[int, float]:
    """How many samples there were, and the CPU seconds that it took."""
    recordings = [read_recording(path) for path in sorted(RECORDINGS.glob("*.run.json"))] * EACH
    jobs = [Job(number, recording) for number, recording in enumerate(recordings)]
    nodes = [jobs[first : first + OF_NODE] for first in range(0, len(jobs), OF_NODE)]
    fleet, samples, live_s = Fleet(retire_after_us=RETIRE_AFTER_US), 0, 0.0
    for second in range(1, SECONDS + 1):
        now_us = START_US + second * S
        batches = [_batch(f"n{number}", second, now_us, node) for number, node in enumerate(nodes)]
        repository.store(batches)
        samples += sum(len(chunk) for batch in batches for chunk in batch.chunks)
        began = time.thread_time()
        changes = fleet.take(*batches) + fleet.tick(now_us, {batch.node: now_us for batch in batches})
        live_s += time.thread_time() - began
        repository.save_alerts([alert_record(change, updated_us=now_us) for change in changes])
        repository.save_forecasts(fleet.forecasts(), made_us=now_us)
    return samples, live_s


class Job:
    """A recorded job, again and again."""

    def __init__(self, number: int, recording: Recording) -> None:
        self.process = Process(
            f"{number:032x}",
            f"job-{number}",
            number,
            "host",
            START_US,
            rank=0,
            devices=(Device(f"GPU-{number}", number % 8, total_bytes=recording.device_total_bytes),),
            allocator_conf=recording.conf,
        )
        self.ref = AllocatorRef(self.process.process_id, self.process.devices[0].uuid)
        self._items = self._seen([one for one in Player(recording, 20) if not isinstance(one, Event)])
        self._next = next(self._items)

    def _seen(self, items: list[Sample | BlockMap]) -> Iterator[Sample | BlockMap]:
        numbers, began_us = count(1), START_US
        while True:
            for item in items:
                yield replace(item, sequence=next(numbers), time_us=item.time_us - items[0].time_us + began_us)
            began_us += items[-1].time_us - items[0].time_us + S

    def until(self, time_us: int) -> list[Sample | BlockMap]:
        """What came since it was asked last."""
        came = []
        while self._next.time_us < time_us:
            came.append(self._next)
            self._next = next(self._items)
        return came


def _batch(node: str, sequence: int, now_us: int, jobs: list[Job]) -> NodeBatch:
    came = [(job.ref, item) for job in jobs for item in job.until(now_us)]
    return NodeBatch(
        node,
        "d",
        sequence,
        closed_us=now_us,
        received_us=now_us,
        processes=tuple(job.process for job in jobs),
        chunks=tuple(chunk for ref, item in came if isinstance(item, Sample) for chunk in chunks(ref, [item])),
        block_maps=tuple((ref, item) for ref, item in came if isinstance(item, BlockMap)),
    )
