"""What a recorded job handed on, worked out from its recording; and what of it the database has."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from allocscope.allocator.player import Player
from allocscope.allocator.recording import Recording, read_recording
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
    recording = _recording(job.recording)
    process_id = summary["process_id"]
    shift_us = summary["start_us"] - recording.start_us
    player = Player(recording, seed=int(process_id, 16), allocator=AllocatorRef(process_id, job.uuid))
    seen = [replace(one, time_us=one.time_us + shift_us) for one in player]
    return Account(
        [one for one in seen if isinstance(one, Sample)],
        [one for one in seen if isinstance(one, BlockMap)],
        [one for one in seen if isinstance(one, Event)],
    )


@cache
def _recording(path: Path) -> Recording:
    return read_recording(path)


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


def is_whole(database: Path, job: Job, summary: dict[str, Any], account: Account) -> bool:
    """Whether the database has as many of this job's things as it handed on; quickly told, to be waited for."""
    of_process = "FROM {} JOIN allocators USING (allocator_id) WHERE process_id = ? AND device_uuid = ?"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        who = (summary["process_id"], job.uuid)
        found = [
            connection.execute(f"SELECT count(*) {of_process.format(table)}", who).fetchone()[0]
            for table in ("samples", "block_maps")
        ]
        found += connection.execute("SELECT count(*) FROM events WHERE process_id = ?", who[:1]).fetchone()
    wanted = [len(account.samples), len(account.block_maps), len(account.events)]
    return all(have >= want for have, want in zip(found, wanted, strict=True))


def count(database: Path, table: str = "samples") -> int:
    """How many rows one of TABLES has now, of everybody."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        (found,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(found)
