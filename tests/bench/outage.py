"""After an outage of the collector of an hour: how soon all is there that waited at a node, and how late meanwhile what is new.

The hour is 60 times as fast, with as many batches as an hour has; what comes after it is at the real pace.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tests.bench.daemon_cost import feed
from tests.bench.daemon_feeder import DEVICES, JOBS
from tests.bench.figures import Figure
from tests.e2e.processes import Machine, Service

SPEED, HOUR_IN_S = 60, 60.0
STARTS_IN_S = 15.0
AT_MOST_S = 200.0
CAUGHT_UP_BATCHES = 5
INTERVAL = ("--interval-s", "0.05")
"""The shortest that a daemon takes; sixty times as fast it makes 1,200 batches of that hour's 1,800."""


def figures() -> Iterator[Figure]:
    """One outage."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        machine = Machine(Path(folder))
        try:
            collector = machine.collector()
            machine.kill(collector)
            daemon = machine.daemon("n1", collector, *INTERVAL)
            feed(daemon, "play", time.time() + STARTS_IN_S, HOUR_IN_S, SPEED).wait()
            waited = _samples(daemon)
            machine.end(daemon)
            yield from _catching_up(machine, waited)
        finally:
            machine.close()


def _catching_up(machine: Machine, waited: float) -> Iterator[Figure]:
    collector = machine.collector()
    daemon = machine.daemon("n1", collector)
    began_s = time.time()
    feeder = feed(daemon, "play", began_s + STARTS_IN_S, AT_MOST_S - STARTS_IN_S, 1)
    late_s = []
    took_s = AT_MOST_S
    while time.time() - began_s < AT_MOST_S:
        threading.Event().wait(1.0)
        if time.time() - began_s > STARTS_IN_S + 3:
            late_s.append(time.time() - _newest_us(machine.database, round(began_s * 1e6)) / 1e6)
        if _waiting(daemon) <= CAUGHT_UP_BATCHES and late_s:
            took_s = time.time() - began_s
            break
    feeder.terminate()
    feeder.wait()
    yield Figure(f"samples that waited, of {JOBS} jobs on {DEVICES} devices", [waited], "")
    yield Figure("until all were stored", [took_s], "s", "minutes")
    yield Figure(
        "the newest sample's age in the database meanwhile, looked at each second", late_s, "s", "some seconds"
    )


def _samples(daemon: Service) -> float:
    return _figure(daemon, "allocscope_samples_ingested_total")


def _waiting(daemon: Service) -> float:
    return _figure(daemon, "allocscope_spool_batches")


def _figure(daemon: Service, name: str) -> float:
    lines = (line for line in daemon.get("/metrics").splitlines() if line.startswith((name + " ", name + "{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


NEWEST = """
SELECT max((SELECT max(time_us) FROM samples WHERE allocator_id = allocators.allocator_id))
FROM allocators JOIN processes USING (process_id) WHERE started_us >= ?
"""


def _newest_us(database: Path, begun_us: int) -> int:
    """Of the jobs that have begun since then."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)) as connection:
        newest: int | None = connection.execute(NEWEST, (begun_us,)).fetchone()[0]
    return newest or 0
