"""What a recorded job handed on, worked out from its recording; and what of it the database has."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allocscope.allocator.player import Player
from allocscope.allocator.recording import read_recording
from allocscope.model import AllocatorRef, BlockMap, Event, Sample
from allocscope.storage.sql import open_repository
from tests.e2e.processes import Job

TABLES = ("samples", "block_maps", "events")


@dataclass(frozen=True, slots=True)
class Account:
    """Everything of one job, in the order of its numbering."""

    samples: Sequence[Sample]
    block_maps: Sequence[BlockMap]
    events: Sequence[Event]


def handed_on(job: Job, summary: dict[str, Any]) -> Account:
    """What `allocscope play` gave to its daemon: all that a probe would have seen, at the play's own time."""
    recording = read_recording(job.recording)
    process_id = summary["process_id"]
    shift_us = summary["start_us"] - recording.start_us
    player = Player(recording, seed=int(process_id, 16), allocator=AllocatorRef(process_id, job.uuid))
    seen = [replace(one, time_us=one.time_us + shift_us) for one in player]
    return Account(
        [one for one in seen if isinstance(one, Sample)],
        [one for one in seen if isinstance(one, BlockMap)],
        [one for one in seen if isinstance(one, Event)],
    )


def stored(database: Path, job: Job, summary: dict[str, Any]) -> Account:
    """What the database has of it."""
    repository = open_repository(f"sqlite:///{database}")
    ref = AllocatorRef(summary["process_id"], job.uuid)
    try:
        chunks = repository.samples(ref, limit=100_000)
        events = repository.events(process_id=ref.process_id, limit=1000).items
        return Account(
            [sample for chunk in chunks for sample in chunk.samples()],
            list(repository.block_maps(ref, limit=10_000)),
            sorted((record.event for record in events), key=lambda event: event.sequence),
        )
    finally:
        repository.close()


def count(database: Path, table: str = "samples") -> int:
    """How many rows one of TABLES has now, of everybody."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        (found,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(found)
