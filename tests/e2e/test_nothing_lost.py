"""Whoever is killed: everything that a job handed to its daemon is in the database, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest

from tests.e2e.accounts import TABLES, count, handed_on, stored
from tests.e2e.processes import Job, Machine, Service, recording

pytestmark = pytest.mark.end_to_end

RUNS = ("kv_serve-1-4114", "curriculum-2-2200", "neighbour-2-6562")
"""They die after 527, 565 and 555 s, so that there are events, too."""
SPEED = 80.0
SOME = 200


@dataclass
class Fleet:
    """Three recorded jobs on one node."""

    machine: Machine
    collector: Service
    daemon: Service
    jobs: list[Job] = field(default_factory=list)

    def play(self) -> None:
        for name in RUNS:
            self.jobs.append(self.machine.play(recording(name), self.daemon, job=name, speed=SPEED))

    def all_run(self) -> bool:
        return all(job.runs for job in self.jobs)


@pytest.fixture
def fleet(machine: Machine) -> Fleet:
    collector = machine.collector()
    return Fleet(machine, collector, machine.daemon("n1", collector))


def in_the_middle(fleet: Fleet) -> None:
    """Wait until some is stored; all jobs still run then."""
    fleet.machine.until(lambda: count(fleet.machine.database) > SOME, "some samples are stored")
    assert fleet.all_run()


def assert_nothing_is_lost(fleet: Fleet) -> None:
    """Sequence by sequence and value by value."""
    summaries = [job.end() for job in fleet.jobs]
    assert [summary["ended"] for summary in summaries] == ["died", "died", "died"]
    assert [summary["unacknowledged"] for summary in summaries] == [0, 0, 0]
    everything = [handed_on(job, summary) for job, summary in zip(fleet.jobs, summaries, strict=True)]
    for table in TABLES:
        expected = sum(len(getattr(account, table)) for account in everything)
        fleet.machine.until(partial(_holds, fleet.machine, table, expected), f"all {table} are stored")
        assert count(fleet.machine.database, table) == expected
    for job, summary, account in zip(fleet.jobs, summaries, everything, strict=True):
        found = stored(fleet.machine.database, job, summary)
        assert found.samples == account.samples
        assert found.block_maps == account.block_maps
        assert found.events == account.events


def _holds(machine: Machine, table: str, at_least: int) -> bool:
    return count(machine.database, table) >= at_least


def test_a_killed_collector_costs_nothing(fleet: Fleet) -> None:
    fleet.play()
    in_the_middle(fleet)
    fleet.machine.kill(fleet.collector)
    fleet.collector = fleet.machine.again(fleet.collector)
    assert_nothing_is_lost(fleet)


def test_a_killed_daemon_costs_nothing_since_jobs_send_again_what_it_had_not_on_disk(fleet: Fleet) -> None:
    fleet.play()
    in_the_middle(fleet)
    fleet.machine.kill(fleet.daemon)
    fleet.daemon = fleet.machine.again(fleet.daemon)
    assert_nothing_is_lost(fleet)


def test_both_killed_at_once_cost_nothing(fleet: Fleet) -> None:
    fleet.play()
    in_the_middle(fleet)
    fleet.daemon.process.kill()
    fleet.collector.process.kill()
    for service in (fleet.daemon, fleet.collector):
        service.process.wait()
    fleet.daemon = fleet.machine.again(fleet.daemon)
    fleet.collector = fleet.machine.again(fleet.collector)
    assert_nothing_is_lost(fleet)


def test_services_that_are_ended_in_order_end_well_and_cost_nothing(fleet: Fleet) -> None:
    fleet.play()
    in_the_middle(fleet)
    fleet.machine.end(fleet.collector)
    fleet.machine.end(fleet.daemon)
    fleet.daemon = fleet.machine.again(fleet.daemon)
    fleet.collector = fleet.machine.again(fleet.collector)
    assert_nothing_is_lost(fleet)


def test_what_happens_before_the_collector_is_there_is_told_to_it_later(machine: Machine) -> None:
    collector = machine.collector()
    machine.kill(collector)
    fleet = Fleet(machine, collector, machine.daemon("n1", collector))
    fleet.play()
    machine.until(
        lambda: _figure(fleet.daemon, "allocscope_samples_ingested_total") > SOME,
        "some samples are on the daemon's disk",
    )
    assert count(machine.database) == 0
    assert fleet.all_run()
    fleet.collector = machine.again(collector)
    assert_nothing_is_lost(fleet)


def test_after_an_outage_both_killed_while_it_is_made_up_for_cost_nothing(machine: Machine) -> None:
    """What waited comes late, beside what is new, and in several attempts."""
    collector = machine.collector()
    machine.kill(collector)
    slowly = ("--interval-s", "0.05", "--backlog-bytes-per-s", "40000")
    fleet = Fleet(machine, collector, machine.daemon("n1", collector, *slowly))
    fleet.play()
    machine.until(lambda: _figure(fleet.daemon, "allocscope_spool_bytes") > 200_000, "seconds of backlog wait")
    fleet.collector = machine.again(collector)
    machine.until(lambda: count(machine.database) > 0, "the first samples are stored")
    assert fleet.daemon.said("what is new goes first")
    fleet.daemon.process.kill()
    fleet.collector.process.kill()
    for service in (fleet.daemon, fleet.collector):
        service.process.wait()
    fleet.daemon = machine.again(fleet.daemon)
    fleet.collector = machine.again(fleet.collector)
    assert_nothing_is_lost(fleet)
    machine.until(lambda: _figure(fleet.daemon, "allocscope_spool_batches") == 0, "nothing waits any more")


def _figure(service: Service, name: str) -> float:
    """A metric's sum over its labels."""
    lines = [line for line in service.get("/metrics").splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
