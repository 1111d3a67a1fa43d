"""Captures as they are met over HTTP, on a real database: lists, downloads, and orders for new ones."""

import gzip
import hashlib
import os
import pickle
import shutil
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from allocscope.collector.advice_questions import AdviceQuestions
from allocscope.collector.api import create_api
from allocscope.collector.capture_api import accepts_gzip
from allocscope.collector.capture_questions import CaptureQuestions
from allocscope.collector.capture_refusals import SnapshotDropped
from allocscope.collector.nodes import Nodes
from allocscope.collector.observation import Observation
from allocscope.collector.questions import Questions
from allocscope.model import (
    AllocatorRef,
    Capture,
    CaptureReason,
    Device,
    DeviceReading,
    Event,
    EventKind,
    Forecast,
    Process,
    Sample,
    State,
    chunks,
)
from allocscope.storage.captures import CaptureArrival, CaptureRecord, CaptureState, OrderLimits
from allocscope.storage.records import NodeBatch
from allocscope.storage.sql import open_repository

NOW_US = 1_800_000_000_000_000
SECOND_US = 1_000_000
PLENTY = OrderLimits(10_000, 10_000, 10_000)
SNAPSHOT = pickle.dumps({"segments": [], "device_traces": [], "noise": os.urandom(3 << 20)}, protocol=4)
PACKED = gzip.compress(SNAPSHOT, 1)
KEPT, FAILED, DROPPED, ORDERED = ("1" * 32, "2" * 32, "3" * 32, "4" * 32)


def process(rank: int | None, job: str = "train", letter: str = "a") -> Process:
    number = 99 if rank is None else rank
    process_id = hashlib.sha256(f"{letter} {job} {number}".encode()).hexdigest()[:32]
    return Process(process_id, job, 100 + number, "host", 5, rank=rank, devices=(Device(f"GPU-{number}", 0),))


TRAIN = [process(rank) for rank in range(4)]
BEFORE, HELPER = process(2, letter="b"), process(None, "helper")
"""Of rank 2 before its restart, not known to be gone; and a process that is no rank."""


def batch(sequence: int, *processes: Process, age_s: float = 1, **more) -> NodeBatch:
    received_us = NOW_US - round(age_s * SECOND_US)
    return NodeBatch("n1", "d1", sequence, NOW_US, received_us, processes=processes, **more)


def bring(repository, capture: Capture, process: Process, packed: bytes = PACKED, **more) -> None:
    captures, size = repository.captures, 1 << 20
    pieces = [packed[at : at + size] for at in range(0, len(packed), size)]
    upload = captures.begin(capture.capture_id, received_us=NOW_US)
    for number, piece in enumerate(pieces):
        captures.add(upload, number, piece, received_us=NOW_US)
    arrival = CaptureArrival(capture, process, "n1", NOW_US, upload, len(pieces), len(packed))
    captures.keep(arrival, limit_bytes=more.get("limit_bytes", 2**40))


def filled(path):
    repository = open_repository(f"sqlite:///{path}")
    devices = [DeviceReading(Device(f"GPU-{n}", 7 - n), NOW_US, True) for n in range(4)]
    refs = [AllocatorRef(one.process_id, one.devices[0].uuid) for one in (*TRAIN, HELPER)]
    known = tuple(chunk for ref in refs for chunk in chunks(ref, [Sample(1, NOW_US, allocated_bytes=7)]))
    gone = process(0, "gone")
    stopped = Event(gone.process_id, 3, NOW_US - 5, EventKind.STOPPED)
    repository.store(
        [
            batch(1, gone, events=(stopped,)),
            batch(2, BEFORE),
            batch(3, *TRAIN, HELPER, readings=tuple(devices), chunks=known),
        ]
    )
    margins = {0: (State.OK, 0.4), 1: (State.OK, 0.2), 2: (State.OK, 0.3)}
    foreseen = [(refs[rank], Forecast(NOW_US, state, margin_ratio=margin)) for rank, (state, margin) in margins.items()]
    repository.save_forecasts(foreseen, made_us=NOW_US)
    bring(repository, Capture(DROPPED, TRAIN[3].process_id, 5, CaptureReason.OOM, snapshot_bytes=9), TRAIN[3])
    took_us = NOW_US - SECOND_US
    kept = Capture(KEPT, TRAIN[3].process_id, took_us, CaptureReason.ASKED, "GPU-3", len(SNAPSHOT), 12, tensors=True)
    bring(repository, kept, TRAIN[3], limit_bytes=len(PACKED))
    failed = Capture(FAILED, TRAIN[0].process_id, took_us, CaptureReason.FORECAST, problem="it was killed")
    repository.captures.keep(CaptureArrival(failed, TRAIN[0], "n1", NOW_US), limit_bytes=0)
    record = CaptureRecord(
        ORDERED,
        TRAIN[1].process_id,
        "train",
        "n1",
        CaptureReason.ASKED,
        CaptureState.ORDERED,
        rank=1,
        ordered_us=NOW_US,
        history_us=1_500_000,
        most_history_entries=50,
    )
    repository.captures.order([record], PLENTY)
    return repository


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("captures") / "c.db"
    filled(path).close()
    return path


@pytest.fixture(scope="module")
def whole(database):
    """For tests that only read."""
    made = open_repository(f"sqlite:///{database}")
    yield made
    made.close()


@pytest.fixture
def repository(database, tmp_path):
    """For tests that order."""
    made = open_repository(f"sqlite:///{shutil.copy(database, tmp_path / 'c.db')}")
    yield made
    made.close()


def client_of(repository, woken=None):
    told = {"now_us": lambda: NOW_US}
    questions = Questions(repository, nodes=Nodes().all, live_for_us=300 * SECOND_US, **told)
    wake = (lambda: woken.append(True)) if woken is not None else lambda: None
    captures = CaptureQuestions(repository, questions, Observation(), wake=wake, **told)
    advice = AdviceQuestions(repository, questions, is_made_here=True, **told)
    api = create_api(questions, captures, advice, registry=CollectorRegistry(), failing=lambda: None)
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://collector")


@pytest.fixture
async def reading(whole):
    async with client_of(whole) as client:
        yield client


@pytest.fixture
async def api(repository):
    async with client_of(repository) as client:
        yield client


def order(api, job: str = "train", **body):
    return api.post(f"/api/v1/jobs/{job}/captures", json=body)


# which there are


async def test_captures_with_all_that_is_known_of_them(reading):
    said = (await reading.get("/api/v1/captures")).json()
    assert [(one["capture_id"], one["state"]) for one in said["items"]] == [
        (ORDERED, "ordered"),
        (FAILED, "failed"),
        (KEPT, "kept"),
        (DROPPED, "dropped"),
    ]
    assert said["next_cursor"] is None
    assert said["items"][2] == {
        "capture_id": KEPT,
        "job_id": "train",
        "job": "train",
        "rank": 3,
        "process_id": TRAIN[3].process_id,
        "node": "n1",
        "gpu": 4,
        "uuid": "GPU-3",
        "reason": "asked",
        "state": "kept",
        "ordered_us": None,
        "sent_us": None,
        "time_us": NOW_US - SECOND_US,
        "received_us": NOW_US,
        "history_s": None,
        "most_history_entries": None,
        "history_entries": 12,
        "tensors": True,
        "snapshot_bytes": len(SNAPSHOT),
        "stored_bytes": len(PACKED),
        "file_name": "train-rank3-20270115T075959Z.pickle",
        "problem": None,
    }


async def test_they_are_found_by_job_and_state_and_page_by_cursor(reading):
    async def listed(**params) -> list[str]:
        return [one["capture_id"] for one in (await reading.get("/api/v1/captures", params=params)).json()["items"]]

    assert await listed(state="kept", job="train") == [KEPT]
    assert await listed(job="helper") == []
    first = (await reading.get("/api/v1/captures", params={"limit": 3})).json()
    assert await listed(limit=3, cursor=first["next_cursor"]) == [DROPPED]


async def test_one_of_them(reading):
    ordered = (await reading.get(f"/api/v1/captures/{ORDERED}/about")).json()
    assert (ordered["state"], ordered["rank"], ordered["history_s"], ordered["most_history_entries"]) == (
        "ordered",
        1,
        1.5,
        50,
    )
    assert (ordered["gpu"], ordered["file_name"], ordered["snapshot_bytes"]) == (None, None, None)


async def test_a_job_has_its_captures(reading):
    said = (await reading.get("/api/v1/jobs/train")).json()
    assert [one["capture_id"] for one in said["captures"]] == [ORDERED, FAILED, KEPT, DROPPED]
    assert (await reading.get("/api/v1/jobs/helper")).json()["captures"] == []


# downloads


async def test_a_download_is_the_pickle_as_it_was_written_whatever_the_client_accepts(reading):
    for accepted in ("identity", "gzip"):
        answer = await reading.get(f"/api/v1/captures/{KEPT}", headers={"accept-encoding": accepted})
        assert answer.content == SNAPSHOT
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == 'attachment; filename="train-rank3-20270115T075959Z.pickle"'
        assert answer.headers["vary"] == "accept-encoding"
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_what_accepts_gzip_gets_it_as_it_is_stored_and_both_say_how_long_they_are(reading):
    async with reading.stream("GET", f"/api/v1/captures/{KEPT}", headers={"accept-encoding": "gzip"}) as answer:
        assert (answer.headers["content-encoding"], answer.headers["content-length"]) == ("gzip", str(len(PACKED)))
        assert b"".join([piece async for piece in answer.aiter_raw()]) == PACKED
    async with reading.stream("GET", f"/api/v1/captures/{KEPT}", headers={"accept-encoding": ""}) as answer:
        assert ("content-encoding" in answer.headers, answer.headers["content-length"]) == (False, str(len(SNAPSHOT)))
        assert b"".join([piece async for piece in answer.aiter_raw()]) == SNAPSHOT


@pytest.mark.parametrize(
    ("header", "accepts"),
    [
        ("", False),
        ("identity", False),
        ("gzip", True),
        ("GZIP", True),
        ("br, gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("*", True),
        ("*;q=0", False),
        ("deflate;q=1, x-gzip", True),
        ("gzip;q=often", False),
        (",;,q=", False),
    ],
)
def test_what_a_client_accepts(header, accepts):
    assert accepts_gzip(header) is accepts


@pytest.mark.parametrize(
    ("path", "status", "code", "says"),
    [
        ("captures/nothing", 404, "unknown_capture", "there is no capture 'nothing'"),
        ("captures/nothing/about", 404, "unknown_capture", "there is no capture 'nothing'"),
        (f"captures/{ORDERED}", 409, "capture_not_ready", "it is on order, and has not come yet"),
        (f"captures/{FAILED}", 404, "no_snapshot", "there is no snapshot: it was killed"),
        (f"captures/{DROPPED}", 410, "snapshot_dropped", "dropped to make room for newer ones; order another one"),
        ("captures?state=odd", 422, "bad_parameter", "state: 'ordered', "),
        ("captures?limit=501", 422, "bad_parameter", "limit"),
        ("captures?cursor=x", 422, "bad_cursor", "no such cursor"),
    ],
)
async def test_what_is_not_there_is_told_with_why(reading, path, status, code, says):
    answer = await reading.get(f"/api/v1/{path}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert says in error["message"]


def captures_of(repository) -> CaptureQuestions:
    nobody: Any = None
    return CaptureQuestions(repository, nobody, Observation(), now_us=lambda: NOW_US, wake=lambda: None)


def test_no_more_than_a_piece_of_a_snapshot_is_in_memory(whole):
    pieces = list(captures_of(whole).snapshot(KEPT).plain())
    assert b"".join(pieces) == SNAPSHOT
    assert 0 < min(map(len, pieces)) <= max(map(len, pieces)) <= 1 << 20


def test_a_snapshot_that_is_dropped_while_it_is_read_does_not_look_whole(repository):
    pieces = captures_of(repository).snapshot(KEPT).plain()
    next(pieces)
    repository.captures.prune(before_us=0, limit_bytes=0, abandoned_before_us=0)
    with pytest.raises(SnapshotDropped, match="while it was read"):
        list(pieces)


# orders


async def test_an_order_is_of_the_rank_that_is_nearest_to_running_out(repository):
    woken: list[bool] = []
    async with client_of(repository, woken) as api:
        answer = await order(api)
    assert (answer.status_code, woken) == (202, [True])
    [said] = answer.json()["items"]
    assert (said["rank"], said["state"], said["reason"], said["node"]) == (1, "ordered", "asked", "n1")
    assert (said["ordered_us"], said["uuid"], said["history_s"], said["tensors"]) == (NOW_US, None, None, False)
    record = repository.captures.find(said["capture_id"])
    assert (record.process_id, record.state) == (TRAIN[1].process_id, CaptureState.ORDERED)


async def test_a_state_outweighs_a_margin_and_without_forecasts_it_is_the_first_rank(repository):
    risk = Forecast(NOW_US, State.AT_RISK, margin_ratio=0.9)
    repository.save_forecasts([(AllocatorRef(TRAIN[2].process_id, "GPU-2"), risk)], made_us=NOW_US)
    new = [process(rank, "new") for rank in (1, 0, 2)]
    repository.store([batch(4, *new)])
    async with client_of(repository) as api:
        assert [one["rank"] for one in (await order(api)).json()["items"]] == [2]
        assert [one["rank"] for one in (await order(api, "new")).json()["items"]] == [0]
        assert [one["rank"] for one in (await order(api, "helper")).json()["items"]] == [None]


@pytest.mark.parametrize(
    ("body", "chosen"),
    [
        ({"rank": 0}, [TRAIN[0]]),
        ({"rank": 2}, [TRAIN[2]]),
        ({"rank": "all"}, TRAIN),
        ({"process_id": BEFORE.process_id}, [BEFORE]),
        ({"process_id": TRAIN[3].process_id, "rank": 3}, [TRAIN[3]]),
    ],
    ids=["a rank", "a rank that was restarted", "all ranks", "a process", "a process and its rank"],
)
async def test_an_order_is_of_whom_it_names(api, body, chosen):
    said = (await order(api, **body)).json()["items"]
    assert [one["process_id"] for one in said] == [one.process_id for one in chosen]


@pytest.mark.parametrize("device", ["GPU-3", "4"])
async def test_a_device_is_named_by_its_uuid_or_its_index_on_its_node(api, device):
    [said] = (await order(api, rank=3, device=device, history_s=20, history_entries=1000, tensors=True)).json()["items"]
    assert (said["uuid"], said["gpu"], said["history_s"], said["most_history_entries"], said["tensors"]) == (
        "GPU-3",
        4,
        20.0,
        1000,
        True,
    )


@pytest.mark.parametrize(
    ("job", "body", "status", "code", "says"),
    [
        ("nobody", {}, 404, "unknown_job", "no reports of job 'nobody'"),
        ("gone", {}, 409, "job_ended", "job 'gone' has ended, or is silent: only what runs can be captured"),
        ("train", {"rank": 9}, 404, "unknown_rank", "is of rank 9; those that run are 0, 1, 2, 3"),
        ("train", {"process_id": "x", "rank": 1}, 404, "unknown_rank", "is of rank 1 and id x; those that run are 0"),
        ("train", {"rank": 3, "device": "9"}, 422, "unknown_device", "does not use device '9'; it uses 4 (GPU-3)"),
        ("train", {"rank": -1}, 422, "bad_parameter", "rank: at least 0 or 'all', not -1"),
        ("train", {"rank": "some"}, 422, "bad_parameter", "rank: a whole number or 'all', not some"),
        ("train", {"rank": True}, 422, "bad_parameter", "rank: a whole number or 'all', not True"),
        ("train", {"history_s": 601}, 422, "bad_parameter", "history_s: at most 600 s, not 601"),
        ("train", {"history_s": 0}, 422, "bad_parameter", "history_s: at least 0.1 s, not 0"),
        ("train", {"history_entries": 10**9}, 422, "bad_parameter", "history_entries: at most 1000000, not 1000000000"),
        ("train", {"device": "x" * 513}, 422, "bad_parameter", "device: at most 512 letters"),
        ("train", {"tensors": "yes"}, 422, "bad_parameter", "tensors: true or false, not yes"),
        ("train", {"stacks": True}, 422, "bad_parameter", "stacks: there is no such parameter"),
    ],
)
async def test_an_order_that_cannot_be_says_why_and_nothing_is_ordered(api, repository, job, body, status, code, says):
    answer = await order(api, job, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], says in error["message"]) == (status, code, True), error
    assert len(repository.captures.open_orders()) == 1


async def test_more_orders_than_may_be_open_are_refused(api, repository):
    for _ in range(3):
        assert (await order(api, rank=1)).status_code == 202
    answer = await order(api, rank=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_orders")
    assert "at most 4 may be: wait until some have come" in answer.json()["error"]["message"]
    assert (await order(api, rank=2)).status_code == 202


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{}", {}, 415, "not_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "not_json"),
        (b"rank=1", {"content-type": "application/x-www-form-urlencoded"}, 415, "not_json"),
        (b"{", {"content-type": "application/json"}, 422, "bad_parameter"),
        (b"[]", {"content-type": "application/json"}, 422, "bad_parameter"),
        (b"", {"content-type": "application/json"}, 422, "bad_parameter"),
        (b'{"rank": ' + b" " * (1 << 16) + b"1}", {"content-type": "application/json"}, 413, "too_large"),
    ],
)
async def test_a_body_is_json_of_bounded_size_that_no_other_sites_page_can_send(api, content, headers, status, code):
    answer = await api.post("/api/v1/jobs/train/captures", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_hostile_name_is_one_part_of_a_path(api, repository):
    name = "a/../b %2F\"'"
    repository.store([batch(4, process(0, name))])
    [said] = (await order(api, "a%2F..%2Fb%20%252F%22%27")).json()["items"]
    assert said["job"] == name


async def test_files_are_called_by_their_jobs_as_far_as_that_can_be(api, repository):
    one = process(None, "../../ü/x\n.")
    bring(repository, Capture("5" * 32, one.process_id, 2**62, CaptureReason.OOM, snapshot_bytes=len(SNAPSHOT)), one)
    said = (await api.get(f"/api/v1/captures/{'5' * 32}/about")).json()
    assert said["file_name"] == "x-4611686018427387904us.pickle"
