"""Captures with a history are replayed in a process of its own, whatever becomes of it: bounded, once, over restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from allocscope.collector import advice as advising
from allocscope.collector.advice import Advisor
from allocscope.collector.advice_process import WORKER
from allocscope.collector.advice_task import Limits
from allocscope.collector.observation import Observation
from allocscope.model import AdviceKind
from allocscope.storage.advice import AdviceRecord
from allocscope.storage.errors import StorageBusy
from allocscope.storage.sql import open_repository
from tests.collector.replayed import LIMITS, MIB, holey, keep, packed, pickled, python, samples

NOW_US = 1_800_000_000_000_000
HANGS = "import time; print('here', flush=True); time.sleep(600)"


class Collector:
    """One collector's advisor, on a database that others may use, too."""

    def __init__(self, folder: Path, command=WORKER, limits=LIMITS, **more) -> None:
        self.repository = open_repository(f"sqlite:///{folder}/c.db")
        self.observation, self.now_us = Observation(), NOW_US
        self.told: list[AdviceRecord] = []
        given = {"now_us": lambda: self.now_us, "told": self.told.extend, **more}
        self.advisor = Advisor(self.repository, self.observation, limits, command=command, **given)

    def kept(self):
        return self.repository.advice.page(limit=100).items

    def figure(self, name, **labels):
        return self.observation.registry.get_sample_value(name, labels)

    async def look(self) -> bool:
        return await asyncio.wait_for(self.advisor.look(), 90)


def id_of(number: int) -> str:
    return f"{number:032x}"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """So that a test need not wait."""
    monkeypatch.setattr(advising, "EVERY_S", 0.05)
    monkeypatch.setattr(advising, "RENEW_EVERY_S", 0.05)


async def test_a_capture_is_replayed_and_what_comes_of_it_is_kept_counted_and_told(tmp_path):
    it = Collector(tmp_path)
    it.repository.store([samples()])
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    assert await it.look()
    [record] = it.kept()
    assert (record.capture_id, record.device_uuid, record.job, record.rank) == (id_of(1), "GPU-1", "train", 0)
    assert (record.node, record.made_us) == ("n1", NOW_US)
    assert record.advice.kind is AdviceKind.SETTING, record.advice
    assert "expandable_segments:True" in (record.advice.conf or "")
    assert record.advice.is_exact, record.advice.exactness
    died, *others = record.advice.trials
    assert died.failed_at is not None
    assert any(trial.failed_at is None and trial.conf == record.advice.conf for trial in others)
    assert it.told == [record]
    assert it.figure("allocscope_advice_total", kind="setting") == 1
    assert it.figure("allocscope_advice_seconds_count") == 1
    assert not await it.look()
    assert it.told == [record], "each is told once"


async def test_what_others_held_of_the_device_is_taken_from_samples_or_said_not_to_be_known(tmp_path):
    it = Collector(tmp_path)
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    assert await it.look()
    [record] = it.kept()
    assert not record.advice.is_exact
    assert "what other processes held of the device meanwhile is not known" in record.advice.exactness


FAULTS = [
    pytest.param(HANGS, "time", "the replay took longer than 1 s (advice_time_limit_s)", id="hangs"),
    pytest.param("import os; os.kill(os.getpid(), 9)", "killed", "the replay was ended by SIGKILL", id="is killed"),
    pytest.param("raise ValueError('odd')", "crashed", "the replay failed with exit status 1", id="crashes"),
    pytest.param("print('hello')", "crashed", "the replay answered what is no answer", id="talks nonsense"),
    pytest.param("print('{}')", "crashed", "the replay answered what is no answer", id="talks in part"),
    pytest.param("while True: print('x' * 100_000)", "time", "the replay took longer than 1 s", id="talks for ever"),
    pytest.param("pass", "crashed", "the replay said nothing", id="says nothing"),
]


@pytest.mark.parametrize(("code", "reason", "says"), FAULTS)
async def test_a_worker_that_fails_costs_its_capture_the_advice_and_nobody_else_anything(tmp_path, code, reason, says):
    it = Collector(tmp_path, python(code), Limits(1.0 if reason == "time" else 60.0, 1 << 30))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    assert await it.look()
    [record] = it.kept()
    assert record.advice.kind is AdviceKind.UNKNOWN
    assert says in record.advice.summary
    assert (record.device_uuid, record.advice.trials) == ("GPU-1", ())
    assert it.figure("allocscope_advice_failed_total", reason=reason) == 1
    assert it.figure("allocscope_advice_total", kind="unknown") == 1
    assert not await it.look(), "it is not tried again"


@pytest.mark.parametrize(
    ("content", "reason", "says"),
    [
        pytest.param(b"nonsense", "snapshot", "is not a pickle, nor JSON", id="not a snapshot"),
        pytest.param(packed(holey())[:-20], "snapshot", "its gzip ends in the middle", id="cut off"),
        pytest.param(pickled(os.system), "snapshot", "posix", id="wants to run something"),
        pytest.param(
            packed({"segments": [], "device_traces": [[]]}), "no_history", "has no history of a device", id="empty"
        ),
    ],
)
async def test_a_snapshot_that_cannot_be_replayed_says_why(tmp_path, content, reason, says):
    it = Collector(tmp_path)
    keep(it.repository, id_of(1), content, received_us=NOW_US)
    assert await it.look()
    [record] = it.kept()
    assert record.advice.kind is AdviceKind.UNKNOWN
    assert says in record.advice.summary
    assert it.figure("allocscope_advice_failed_total", reason=reason) == 1


async def test_a_snapshot_that_needs_more_memory_than_a_replay_may_take_ends_its_worker_only(tmp_path):
    it = Collector(tmp_path, limits=Limits(60.0, 256 * MIB))
    block = {"address": 0, "size": 512, "requested_size": 512, "state": "inactive"}
    large = {"segments": [], "device_traces": [[]], "more": [dict(block) for _ in range(2_000_000)]}
    keep(it.repository, id_of(1), packed(large), received_us=NOW_US)
    assert await it.look()
    [record] = it.kept()
    assert record.advice.summary == "the replay needs more than 256.00 MiB of memory (advice_memory_bytes)"
    assert it.figure("allocscope_advice_failed_total", reason="memory") == 1


async def test_a_snapshot_that_was_dropped_meanwhile_is_said_to_be_gone(tmp_path, monkeypatch):
    it = Collector(tmp_path)
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    dropping = it.repository.captures.piece

    def drop(capture_id, number):
        it.repository.captures.prune(before_us=NOW_US + 1, limit_bytes=0, abandoned_before_us=0)
        return dropping(capture_id, number)

    monkeypatch.setattr(it.repository.captures, "piece", drop)
    assert await it.look()
    [record] = it.kept()
    assert record.advice.summary == "its snapshot was dropped before it could be replayed"


@asynccontextmanager
async def following(it: Collector):
    """Its loop, as the collector runs it."""
    task = asyncio.create_task(it.advisor.follow())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition, what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.02)


def marking(path: Path) -> str:
    """A worker that leaves its id there, and hangs."""
    return f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_in(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text or 0)


async def test_a_collector_that_ends_takes_its_worker_along_and_the_next_one_begins_anew_at_once(tmp_path):
    mark = tmp_path / "pid"
    it = Collector(tmp_path, python(marking(mark)))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    async with following(it):
        await until(lambda: pid_in(mark), "the worker runs")
    assert not lives(pid_in(mark))
    assert it.kept() == ()
    again = Collector(tmp_path)
    assert await again.look()
    assert [record.advice.kind for record in again.kept()] == [AdviceKind.SETTING]


async def test_a_claim_of_a_collector_that_was_killed_is_taken_over_once_it_has_run_out(tmp_path):
    dead = Collector(tmp_path)
    keep(dead.repository, id_of(1), packed(holey()), received_us=NOW_US)
    dead.repository.advice.claim("dead", now_us=NOW_US, until_us=NOW_US + 20_000_000, received_since_us=0)
    it = Collector(tmp_path)
    assert not await it.look()
    it.now_us += 20_000_000
    assert await it.look()
    assert [record.advice.kind for record in it.kept()] == [AdviceKind.SETTING]


async def test_a_capture_that_ends_collector_after_collector_is_given_up(tmp_path):
    it = Collector(tmp_path, python("import sys; sys.exit('must not run')"))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    for life in range(3):
        assert it.repository.advice.claim(f"{life}", now_us=NOW_US, until_us=NOW_US, received_since_us=0)
    assert await it.look()
    [record] = it.kept()
    assert record.advice.summary == "it was begun 3 times, and each time the collector ended before the replay did"
    assert it.figure("allocscope_advice_failed_total", reason="given_up") == 1


async def test_two_collectors_on_one_database_replay_each_capture_once_and_both_tell_of_it(tmp_path):
    log = tmp_path / "log"
    says_so = f"open({str(log)!r}, 'a').write('one\\n'); import os; os._exit(3)"
    both = [Collector(tmp_path, python(says_so)) for _ in range(2)]
    for number in range(1, 7):
        keep(both[0].repository, id_of(number), packed(holey()), received_us=NOW_US, job=f"job{number}")
    async with following(both[0]), following(both[1]):
        await until(lambda: all(len(one.told) == 6 for one in both), "both tell of all")
    assert log.read_text().splitlines() == ["one"] * 6
    done = [one.figure("allocscope_advice_total", kind="unknown") or 0 for one in both]
    assert sum(done) == 6


async def test_a_claim_that_somebody_else_took_over_is_let_go_with_its_worker(tmp_path):
    """As where this process was stopped for longer than a claim holds."""
    mark = tmp_path / "pid"
    it = Collector(tmp_path, python(marking(mark)))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    async with following(it):
        await until(lambda: pid_in(mark), "the worker runs")
        pid = pid_in(mark)
        later_us = NOW_US + 3_600_000_000
        it.repository.advice.claim("other", now_us=later_us, until_us=later_us + 1, received_since_us=0)
        await until(lambda: not lives(pid), "the worker is ended")
        assert it.kept() == ()
        assert it.repository.advice.settle(id_of(1), "other", [])


async def test_a_claim_is_renewed_while_the_worker_works(tmp_path):
    mark = tmp_path / "pid"
    it = Collector(tmp_path, python(marking(mark)))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    async with following(it):
        await until(lambda: pid_in(mark), "the worker runs")
        it.now_us += 3_600_000_000
        until_us = it.now_us + 20_000_000

        def is_renewed() -> bool:
            return not it.repository.advice.waiting(now_us=until_us - 1, received_since_us=0)

        await until(is_renewed, "the claim holds for longer")
        assert it.repository.advice.claim("other", now_us=until_us - 1, until_us=until_us, received_since_us=0) is None


async def test_one_that_is_killed_by_hand_is_an_answer_too(tmp_path):
    mark = tmp_path / "pid"
    it = Collector(tmp_path, python(marking(mark)))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    async with following(it):
        await until(lambda: pid_in(mark), "the worker runs")
        os.kill(pid_in(mark), signal.SIGKILL)
        await until(it.kept, "there is an answer")
    [record] = it.kept()
    assert record.advice.summary == "the replay was ended by SIGKILL"


async def test_a_collector_whose_setting_is_off_tells_what_others_find(tmp_path):
    off, it = Collector(tmp_path, enabled=False), Collector(tmp_path, python("import os; os._exit(3)"))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    assert not await off.look()
    assert off.told == []
    assert await it.look()
    assert not await off.look()
    assert off.told == it.told == list(it.kept())


async def test_a_database_that_takes_nothing_is_asked_again(tmp_path, monkeypatch):
    it = Collector(tmp_path, python("import os; os._exit(3)"))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    claiming = type(it.repository.advice).claim

    def busy(*_, **__):
        raise StorageBusy("busy")

    monkeypatch.setattr(type(it.repository.advice), "claim", busy)
    assert not await it.look()
    monkeypatch.setattr(type(it.repository.advice), "claim", claiming)
    assert await it.look()


async def test_a_disk_that_is_full_is_tried_again_a_few_times(tmp_path, monkeypatch):
    it = Collector(tmp_path)
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for _ in range(2):
        assert not await it.look()
        it.now_us += 20_000_000
    assert await it.look()
    [record] = it.kept()
    assert record.advice.summary == "a temporary file for it, or a process, cannot be had: No space left on device"
    assert it.figure("allocscope_advice_failed_total", reason="system") == 1


async def test_a_worker_gets_no_secret_of_its_collector_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLOCSCOPE_WEBHOOK", "https://secret")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    seen = tmp_path / "seen"
    tells = (
        f"import os, json; json.dump([dict(os.environ), os.listdir(os.environ['TMPDIR'])], open({str(seen)!r}, 'w'))"
    )
    it = Collector(tmp_path, python(tells))
    keep(it.repository, id_of(1), packed(holey()), received_us=NOW_US)
    assert await it.look()
    assert "ALLOCSCOPE_WEBHOOK" not in seen.read_text()
    assert seen.read_text().endswith(", []]")
