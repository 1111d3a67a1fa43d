"""Advice as the query API tells it: the newest first, by rank and device, with what is still to come."""

from __future__ import annotations

import pytest

from allocscope.model import Advice, AdviceKind, CaptureReason, Trial
from allocscope.storage.captures import CaptureRecord, CaptureState, OrderLimits
from allocscope.storage.repository import AdviceRecord
from allocscope.storage.sql import open_repository
from tests.collector.replayed import keep, samples
from tests.collector.test_api import NOW_US, ask, client_of

SETTING = Advice(
    AdviceKind.SETTING,
    "expandable_segments:True serves every request",
    conf="expandable_segments:True",
    gains=("3.1 GiB less reserved",),
    is_exact=True,
    exactness="all 900 entries",
    torch_version="2.14.1",
    requests=900,
    trials=(Trial("", failed_at=899, reserved_peak_bytes=7), Trial("expandable_segments:True", blocked="a hazard")),
)
UNKNOWN = Advice(AdviceKind.UNKNOWN, "the replay was ended by SIGKILL")


def id_of(number: int) -> str:
    return f"{number:032x}"


def order(repository, number: int, **more) -> None:
    ordered = CaptureRecord(
        id_of(number), id_of(1), "train", "n1", CaptureReason.ASKED, CaptureState.ORDERED, rank=0, ordered_us=1, **more
    )
    repository.captures.order([ordered], OrderLimits(9, 9, 9))


def settle(repository, number: int, advice: Advice, *, rank: int = 0, uuid: str = "GPU-1") -> None:
    """A capture that came, and what was made of it."""
    keep(repository, id_of(number), b"x", received_us=NOW_US - 100 + number, number=rank + 1)
    claimed = repository.advice.claim("me", now_us=NOW_US, until_us=NOW_US + 1, received_since_us=0)
    assert claimed.capture.capture_id == id_of(number)
    record = AdviceRecord(id_of(number), id_of(rank + 1), uuid, "train", rank, "n1", NOW_US + number, advice)
    assert repository.advice.settle(id_of(number), "me", [record])


@pytest.fixture
def repository(tmp_path):
    made = open_repository(f"sqlite:///{tmp_path}/c.db")
    made.store([samples()])
    settle(made, 11, SETTING)
    settle(made, 12, UNKNOWN, rank=1, uuid="GPU-2")
    yield made
    made.close()


@pytest.fixture
async def api(repository):
    async with client_of(repository) as client:
        yield client


async def test_a_jobs_advice_is_told_whole(api):
    said = await ask(api, "/api/v1/jobs/train/advice", rank=0)
    assert (said["job"], said["next_cursor"], said["under_way"], said["is_made_here"]) == ("train", None, [], True)
    [one] = said["items"]
    trial = {
        "conf": "", "change": None, "failed_at": 899, "failed_us": None, "reserved_peak_bytes": 7,
        "stranded_peak_bytes": 0, "allocated_peak_bytes": 0, "num_alloc_retries": 0, "num_device_alloc": 0,
        "num_device_free": 0, "needed_bytes": None, "blocked": None,
    }  # fmt: skip
    second = {
        **trial,
        "conf": "expandable_segments:True",
        "failed_at": None,
        "reserved_peak_bytes": 0,
        "blocked": "a hazard",
    }
    assert {**one, "trials": one["trials"]} == {
        "capture_id": id_of(11), "job_id": "train", "job": "train", "rank": 0, "process_id": id_of(1), "node": "n1",
        "gpu": None, "uuid": "GPU-1", "made_us": NOW_US + 11, "kind": "setting",
        "summary": "expandable_segments:True serves every request", "conf": "expandable_segments:True", "change": None,
        "gains": ["3.1 GiB less reserved"], "costs": [], "hazards": [], "is_exact": True, "exactness": "all 900 entries",
        "torch_version": "2.14.1", "requests": 900, "trials": [trial, second],
    }  # fmt: skip


async def test_lists_are_by_rank_device_and_capture_and_in_pages(api):
    async def found(path="/api/v1/jobs/train/advice", **params) -> list[int]:
        return [int(one["capture_id"], 16) for one in (await ask(api, path, **params))["items"]]

    assert await found() == await found("/api/v1/advice") == [12, 11]
    assert await found(rank=1) == await found(uuid="GPU-2") == await found(capture=id_of(12)) == [12]
    first = await ask(api, "/api/v1/jobs/train/advice", limit=1)
    assert await found(limit=1, cursor=first["next_cursor"]) == [11]
    assert await found(rank=7) == []


async def test_what_is_still_to_come_is_told(api, repository):
    order(repository, 21, history_us=5, device_uuid="GPU-1")
    order(repository, 22)
    keep(repository, id_of(23), b"x", received_us=NOW_US - 1, number=2)
    keep(repository, id_of(24), b"x", received_us=NOW_US - 1, history_entries=0)
    said = await ask(api, "/api/v1/jobs/train/advice")
    assert said["under_way"] == [
        {"capture_id": id_of(21), "rank": 0, "node": "n1", "uuid": "GPU-1", "reason": "asked", "state": "ordered"},
        {"capture_id": id_of(23), "rank": 1, "node": "n1", "uuid": "GPU-2", "reason": "forecast", "state": "kept"},
    ]
    assert [one["rank"] for one in (await ask(api, "/api/v1/jobs/train/advice", rank=1))["under_way"]] == [1]


async def test_the_job_itself_says_it_too(api):
    said = await ask(api, "/api/v1/jobs/train")
    assert [one["kind"] for one in said["advice"]] == ["unknown", "setting"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/v1/jobs/nobody/advice", 404, "unknown_job"),
        ("/api/v1/jobs/train/advice?rank=-1", 422, "bad_parameter"),
        ("/api/v1/jobs/train/advice?cursor=nonsense", 422, "bad_cursor"),
        ("/api/v1/advice?limit=0", 422, "bad_parameter"),
    ],
)
async def test_what_cannot_be_answered_says_why(api, path, status, code):
    answer = await api.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
