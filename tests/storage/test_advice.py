"""What every backend promises of advice (`allocscope.storage.advice`), each promise tried on each of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from allocscope.model import Advice, AdviceKind, Trial
from allocscope.model.advice_plain import advice_to_plain
from allocscope.storage.repository import AdviceRecord, BadCursor
from tests.storage.made import LARGEST, UUID, process
from tests.storage.test_captures import NO_LIMIT, bring, capture, id_of

ADVICE = Advice(
    AdviceKind.SETTING,
    "expandable_segments:True serves every request with 3.1 GiB to spare; été 🚀",
    conf="expandable_segments:True",
    gains=("3.1 GiB less reserved",),
    costs=("140 more calls to the driver", "none else"),
    hazards=("none with CUDA IPC",),
    is_exact=True,
    exactness="all 900 entries",
    torch_version="2.14.1",
    requests=900,
    trials=(
        Trial("", failed_at=899, failed_us=LARGEST, reserved_peak_bytes=LARGEST, needed_bytes=None),
        Trial("expandable_segments:True", change="buckets:8", needed_bytes=5, blocked="a hazard"),
    ),
)


def record(number: int = 1, **more) -> AdviceRecord:
    given = {"process_id": "p1", "device_uuid": UUID, "job": "train", "rank": 3, "node": "n1", "made_us": 2000 + number}
    return AdviceRecord(id_of(number), **{**given, "advice": ADVICE, **more})


def bring_with_history(repository, number: int, job: str = "train") -> None:
    who = process(f"p-{job}", job, rank=3)
    bring(repository, number, capture=capture(number, process_id=who.process_id, history_entries=9), process=who)


def claim(repository, by: str = "me", *, now_us: int = 5000, until_us: int = 6000, since_us: int = 0):
    """The number of the capture, and how often it was claimed."""
    got = repository.advice.claim(by, now_us=now_us, until_us=until_us, received_since_us=since_us)
    return None if got is None else (int(got.capture.capture_id, 16), got.tries)


class TestClaims:
    def test_a_capture_with_a_history_is_claimed_once(self, repository):
        bring_with_history(repository, 1)
        assert repository.advice.waiting(now_us=5000, received_since_us=0) == 1
        got = repository.advice.claim("me", now_us=5000, until_us=6000, received_since_us=0)
        assert (got.capture, got.tries) == (repository.captures.find(id_of(1)), 1)
        assert claim(repository, "other") is None
        assert repository.advice.waiting(now_us=5000, received_since_us=0) == 0

    def test_one_without_a_history_or_a_snapshot_or_too_old_waits_for_nobody(self, repository):
        bring(repository, 1)
        bring_with_history(repository, 2)
        assert claim(repository, since_us=1003) is None
        bring_with_history(repository, 3)
        repository.captures.prune(before_us=2000, limit_bytes=NO_LIMIT, abandoned_before_us=0)
        assert claim(repository) is None
        assert repository.advice.waiting(now_us=5000, received_since_us=0) == 0

    def test_of_a_job_the_newest_is_first_and_no_job_holds_up_the_others(self, repository):
        for number, job in enumerate(["a", "a", "b", "a", "b", "c"], 1):
            bring_with_history(repository, number, job)
        order = [claim(repository) for _ in range(7)]
        assert order == [(4, 1), (2, 1), (1, 1), (5, 1), (3, 1), (6, 1), None]

    def test_one_that_nobody_renews_is_claimed_anew_and_counts(self, repository):
        bring_with_history(repository, 1)
        assert claim(repository, "dead") == (1, 1)
        assert claim(repository, now_us=5999) is None
        assert claim(repository, now_us=6000, until_us=7000) == (1, 2)
        assert not repository.advice.renew(id_of(1), "dead", until_us=9000)
        assert repository.advice.renew(id_of(1), "me", until_us=9000)
        assert claim(repository, "other", now_us=8999) is None
        assert not repository.advice.settle(id_of(1), "dead", [record()])
        assert repository.advice.page().items == ()

    def test_one_that_is_given_back_was_never_claimed(self, repository):
        bring_with_history(repository, 1)
        assert claim(repository) == (1, 1)
        repository.advice.release(id_of(1), "other")
        assert claim(repository, "third") is None
        repository.advice.release(id_of(1), "me")
        assert claim(repository, "third") == (1, 1)

    def test_one_that_is_settled_is_never_claimed_again(self, repository):
        bring_with_history(repository, 1)
        claim(repository)
        assert repository.advice.settle(id_of(1), "me", [record()])
        assert not repository.advice.settle(id_of(1), "me", [record(advice=Advice(AdviceKind.UNKNOWN, "late"))])
        assert repository.advice.page().items == (record(),)
        repository.advice.release(id_of(1), "me")
        assert not repository.advice.renew(id_of(1), "me", until_us=9000)
        assert repository.advice.prune(before_us=LARGEST) == 1
        assert claim(repository, now_us=LARGEST) is None

    def test_what_is_still_to_come_of_a_job(self, repository):
        for number, job in enumerate(["a", "b", "a", "a"], 1):
            bring_with_history(repository, number, job)

        def to_come(**more) -> list[int]:
            found = repository.advice.unsettled("a", **{"received_since_us": 0, **more})
            return [int(one.capture_id, 16) for one in found]

        assert to_come() == [4, 3, 1]
        assert [claim(repository), claim(repository)] == [(2, 1), (4, 1)]
        assert to_come() == [4, 3, 1], "also what is being worked on"
        repository.advice.settle(id_of(4), "me", [])
        assert (to_come(), to_come(limit=1), to_come(received_since_us=1002)) == ([3, 1], [3], [3])

    def test_several_collectors_claim_each_once(self, backend):
        repositories = [backend.open(), backend.open()]
        for number in range(1, 9):
            bring_with_history(repositories[0], number, job=f"job{number % 3}")
        ready = threading.Barrier(4)

        def work(worker: int) -> list[int]:
            ready.wait(timeout=30)
            mine = []
            while (got := claim(repositories[worker % 2], f"w{worker}")) is not None:
                mine.append(got[0])
            return mine

        with ThreadPoolExecutor(4) as pool:
            done = [number for mine in pool.map(work, range(4)) for number in mine]
        assert sorted(done) == [1, 2, 3, 4, 5, 6, 7, 8]


class TestAdvice:
    def test_it_comes_back_as_it_came(self, repository):
        bring_with_history(repository, 1)
        claim(repository)
        second = record(device_uuid="GPU-2", rank=None, advice=Advice(AdviceKind.UNKNOWN, "the replay was killed"))
        assert repository.advice.settle(id_of(1), "me", [record(), second])
        assert repository.advice.page().items == (second, record())

    def test_none_may_come_of_it(self, repository):
        bring_with_history(repository, 1)
        claim(repository)
        assert repository.advice.settle(id_of(1), "me", [])
        assert repository.advice.page().items == ()
        assert claim(repository, now_us=LARGEST) is None

    def test_lists_are_by_job_rank_device_process_and_capture(self, repository):
        records = [
            record(1),
            record(2, job="other", process_id="p2"),
            record(3, rank=0),
            record(4, device_uuid="GPU-2"),
        ]
        for number, one in enumerate(records, 1):
            bring_with_history(repository, number)
            claim(repository)
            assert repository.advice.settle(id_of(number), "me", [one])
        page = repository.advice.page
        assert page(job="train").items == (records[3], records[2], records[0])
        assert page(job="train", rank=3).items == (records[3], records[0])
        assert page(job="train", rank=0).items == (records[2],)
        assert page(device_uuid="GPU-2").items == (records[3],)
        assert page(process_id="p2").items == page(capture_id=id_of(2)).items == (records[1],)
        first = page(limit=3)
        assert first.items == (records[3], records[2], records[1])
        assert page(limit=3, cursor=first.next_cursor).items == (records[0],)
        with pytest.raises(BadCursor):
            page(cursor="nonsense")

    def test_what_is_older_than_anybody_wants_is_taken_away(self, repository):
        for number in (1, 2):
            bring_with_history(repository, number)
            claim(repository)
            repository.advice.settle(id_of(number), "me", [record(number)])
        assert repository.advice.prune(before_us=2002) == 1
        assert repository.advice.page().items == (record(2),)

    def test_what_a_later_version_knows_more_is_passed_over(self, repository, monkeypatch):
        trial = {"conf": "", "sharding": 1}
        more = {**advice_to_plain(ADVICE), "mood": "good", "trials": [trial]}
        monkeypatch.setattr("allocscope.storage.sql_advice.advice_to_plain", lambda _: more)
        bring_with_history(repository, 1)
        claim(repository)
        repository.advice.settle(id_of(1), "me", [record()])
        assert repository.advice.page().items == (record(advice=replace(ADVICE, trials=(Trial(""),))),)
