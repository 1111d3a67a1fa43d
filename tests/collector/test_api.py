"""The API as it is met over HTTP, on a real database with figures that are written out here."""

import json
from functools import partial

import httpx
import pytest
from prometheus_client import CollectorRegistry

from allocscope.collector.advice_questions import AdviceQuestions
from allocscope.collector.api import create_api
from allocscope.collector.capture_questions import CaptureQuestions
from allocscope.collector.nodes import Hello, Nodes
from allocscope.collector.observation import Observation
from allocscope.collector.questions import Questions
from allocscope.model import (
    AllocatorRef,
    BillEntry,
    Cause,
    Device,
    DeviceBill,
    DeviceProcess,
    DeviceReading,
    Event,
    EventKind,
    Forecast,
    Line,
    Owner,
    Process,
    Sample,
    State,
    chunks,
)
from allocscope.storage.records import AlertRecord, NodeBatch
from allocscope.storage.sql import open_repository

NOW_US = 1_800_000_000_000_000
SECOND_US = 1_000_000
HOSTILE = "<img src=x onerror=alert(1)>/../a b%2F\"'"
UUID = "GPU-1"


def process(process_id, job, rank=0):
    return Process(
        process_id,
        job,
        100 + rank,
        "host",
        5,
        rank=rank,
        world_size=2,
        devices=(Device(UUID, 0, "H200", 1000),),
        torch_version="2.14.1",
    )


TRAIN0, TRAIN1, ODD, GONE = (
    process("a" * 32, "train"),
    process("b" * 32, "train", 1),
    process("c" * 32, HOSTILE),
    process("d" * 32, "gone"),
)

BILL = DeviceBill(
    1000,
    (
        BillEntry(Line.FREE, 400),
        BillEntry(Line.REQUESTED, 300, True, "a" * 32),
        BillEntry(Line.STRANDED, 50, False, "a" * 32),
        BillEntry(Line.REQUESTED, 150, True, "b" * 32),
        BillEntry(Line.OTHER_PROCESSES, 100),
    ),
)
ANN = Owner("ann", slurm_job="8812", slurm_step="0")
READING = DeviceReading(
    Device(UUID, 3, "H200", 1000),
    NOW_US - 7,
    True,
    free_bytes=400,
    processes=(DeviceProcess(100, "a" * 32, "python", 350, ANN), DeviceProcess(9, None, "Xorg", None)),
    bill=BILL,
)


def batch(sequence, *processes, age_s=1.0, **more):
    return NodeBatch("n1", "d1", sequence, NOW_US, NOW_US - round(age_s * SECOND_US), processes=processes, **more)


def filled(folder):
    repository = open_repository(f"sqlite:///{folder / 'c.db'}")
    repository.register_node(
        "n1",
        "d1",
        version="1.2",
        metrics_address="10.0.0.1:9466",
        received_us=NOW_US - 9 * SECOND_US,
        silent_before_us=0,
    )
    repository.register_node(
        "n0", "d0", version="1.2", metrics_address=None, received_us=NOW_US - 9 * SECOND_US, silent_before_us=0
    )
    long_ago_us = NOW_US - 48 * 3600 * SECOND_US
    repository.register_node(
        "old", "d9", version="1.1", metrics_address="10.0.0.9:9466", received_us=long_ago_us, silent_before_us=0
    )
    ref = AllocatorRef("a" * 32, UUID)
    known = [Sample(n, NOW_US + n * SECOND_US, allocated_bytes=10 * n, reserved_bytes=100) for n in range(1, 5)]
    other = [Sample(1, NOW_US, allocated_bytes=7)]
    gone = Event("d" * 32, 3, NOW_US - 5, EventKind.STOPPED)
    oom = Event(
        "d" * 32,
        2,
        NOW_US - 6,
        EventKind.OOM,
        UUID,
        requested_bytes=64,
        device_free_bytes=0,
        message="CUDA out of memory.",
    )
    repository.store(
        [
            batch(1, GONE, age_s=30, events=(oom, gone), chunks=tuple(chunks(AllocatorRef("d" * 32, UUID), other))),
            batch(
                2,
                TRAIN0,
                TRAIN1,
                chunks=(*chunks(ref, known), *chunks(AllocatorRef("b" * 32, UUID), other)),
                readings=(READING,),
            ),
            batch(3, ODD, chunks=tuple(chunks(AllocatorRef("c" * 32, UUID), other))),
        ]
    )
    critical = Forecast(
        NOW_US + 4 * SECOND_US,
        State.CRITICAL,
        Cause.FRAGMENTATION,
        40,
        64,
        -0.024,
        90.5,
        "40 B are free in one piece, 64 B are asked for",
    )
    fine = Forecast(NOW_US, State.OK, margin_ratio=0.5)
    repository.save_forecasts([(ref, critical), (AllocatorRef("b" * 32, UUID), fine)], made_us=NOW_US)
    repository.save_forecasts([(AllocatorRef("d" * 32, UUID), critical)], made_us=NOW_US)
    firing = AlertRecord(
        "id1",
        "AllocscopeFragmentationOOMRisk",
        "critical",
        "firing",
        NOW_US + 1,
        NOW_US + 2,
        Cause.FRAGMENTATION,
        "train",
        labels={"rank": "0"},
        summary="s",
        description="d",
        advice="take another setting",
    )
    over = AlertRecord("id2", "AllocscopeOOM", "warning", "resolved", NOW_US - 6, NOW_US, None, "gone", NOW_US - 5)
    repository.save_alerts([firing, over])
    return repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    made = filled(tmp_path_factory.mktemp("api"))
    yield made
    made.close()


def client_of(repository, failing=None, nodes=None):
    nodes = nodes or Nodes()
    questions = Questions(repository, nodes=nodes.all, now_us=lambda: NOW_US, live_for_us=300 * SECOND_US)
    captures = CaptureQuestions(repository, questions, Observation(), now_us=lambda: NOW_US, wake=lambda: None)
    advice = AdviceQuestions(repository, questions, now_us=lambda: NOW_US, is_made_here=True)
    api = create_api(questions, captures, advice, registry=CollectorRegistry(), failing=lambda: failing)
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://collector")


@pytest.fixture
async def api(repository):
    nodes = Nodes()
    state = nodes.attach(Hello("n1", "d1", "1.2", None), NOW_US, lambda: None)
    nodes.heard(state, sent_us=NOW_US - 250_000, now_us=NOW_US)
    async with client_of(repository, nodes=nodes) as client:
        yield client


async def ask(api, path, **params):
    answer = await api.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_nodes(api):
    said = await ask(api, "/api/v1/nodes")
    assert [node["node"] for node in said["items"]] == ["n0", "n1", "old"]
    assert said["items"][1] == {
        "node": "n1",
        "daemon_id": "d1",
        "version": "1.2",
        "metrics_address": "10.0.0.1:9466",
        "connected": True,
        "clock_offset_s": -0.25,
        "first_received_us": NOW_US - 9 * SECOND_US,
        "last_received_us": NOW_US - SECOND_US,
    }
    assert said["items"][0]["connected"] is False
    assert said["items"][0]["clock_offset_s"] is None
    assert said["next_cursor"] is None


async def test_prometheus_is_told_of_daemons_that_were_heard_lately(api):
    assert await ask(api, "/sd/prometheus") == [
        {"targets": ["10.0.0.1:9466"], "labels": {"__meta_allocscope_node": "n1"}}
    ]


XORG = {
    "pid": 9,
    "name": "Xorg",
    "used_bytes": None,
    "process_id": None,
    "job": None,
    "rank": None,
    "owner": None,
}


async def test_nobody_is_said_to_use_a_device_that_was_not_read_for_long(repository):
    """As on a node without NVML, whose last job has ended."""
    nodes = Nodes()
    for later_s, users in ((299, 1), (301, 0)):
        now_us = partial(int, NOW_US + (later_s - 1) * SECOND_US)
        questions = Questions(repository, nodes=nodes.all, now_us=now_us, live_for_us=300 * SECOND_US)
        device = questions.devices("n1", None, 10)["items"][0]
        assert (min(len(device["processes"]), 1), device["bill"]["total_bytes"]) == (users, 1000)


async def test_devices(api):
    said = await ask(api, "/api/v1/devices", node="n1")
    assert said["items"] == [
        {
            "node": "n1",
            "gpu": 3,
            "uuid": UUID,
            "model": "H200",
            "parent_uuid": None,
            "total_bytes": 1000,
            "free_bytes": 400,
            "driver_bytes": None,
            "time_us": NOW_US - 7,
            "received_us": NOW_US - SECOND_US,
            "from_nvml": True,
            "problem": None,
            "problem_kind": None,
            "bill": {
                "total_bytes": 1000,
                "lines": [
                    {
                        "line": "requested",
                        "bytes": 300,
                        "exact": True,
                        "process_id": "a" * 32,
                        "job": "train",
                        "rank": 0,
                    },
                    {
                        "line": "requested",
                        "bytes": 150,
                        "exact": True,
                        "process_id": "b" * 32,
                        "job": "train",
                        "rank": 1,
                    },
                    {
                        "line": "stranded",
                        "bytes": 50,
                        "exact": False,
                        "process_id": "a" * 32,
                        "job": "train",
                        "rank": 0,
                    },
                    {
                        "line": "other_processes",
                        "bytes": 100,
                        "exact": True,
                        "process_id": None,
                        "job": None,
                        "rank": None,
                    },
                    {"line": "free", "bytes": 400, "exact": True, "process_id": None, "job": None, "rank": None},
                ],
            },
            "processes": [
                {
                    "pid": 100,
                    "name": "python",
                    "used_bytes": 350,
                    "process_id": "a" * 32,
                    "job": "train",
                    "rank": 0,
                    "owner": {
                        "user": "ann",
                        "container_id": None,
                        "container": None,
                        "pod": None,
                        "namespace": None,
                        "pod_uid": None,
                        "slurm_job": "8812",
                        "slurm_step": "0",
                    },
                },
                XORG,
            ],
        }
    ]
    assert (await ask(api, "/api/v1/devices", node="n0"))["items"] == []


async def test_jobs_with_the_allocator_that_is_worst_off(api):
    said = await ask(api, "/api/v1/jobs")
    by_name = {job["job"]: job for job in said["items"]}
    assert set(by_name) == {"train", "gone", HOSTILE}
    assert by_name["train"] == {
        "job_id": "train",
        "job": "train",
        "live": True,
        "state": "critical",
        "cause": "fragmentation",
        "nodes": ["n1"],
        "process_count": 2,
        "allocators_live": 2,
        "allocators_by_state": {"ok": 1, "watch": 0, "at_risk": 0, "critical": 1},
        "worst": {
            "process_id": "a" * 32,
            "rank": 0,
            "pid": 100,
            "node": "n1",
            "gpu": 3,
            "uuid": UUID,
            "live": True,
            "forecast": {
                "time_us": NOW_US + 4 * SECOND_US,
                "state": "critical",
                "cause": "fragmentation",
                "headroom_bytes": 40,
                "request_bytes": 64,
                "margin_ratio": -0.024,
                "seconds_to_oom": 90.5,
                "summary": "40 B are free in one piece, 64 B are asked for",
            },
            "bill": {
                "total_bytes": 1000,
                "lines": [
                    {"line": "requested", "bytes": 300, "exact": True},
                    {"line": "stranded", "bytes": 50, "exact": False},
                    {"line": "other_processes", "bytes": 250, "exact": True},
                    {"line": "free", "bytes": 400, "exact": True},
                ],
            },
        },
        "first_received_us": NOW_US - SECOND_US,
        "last_received_us": NOW_US - SECOND_US,
    }
    assert (by_name["gone"]["live"], by_name["gone"]["state"], by_name["gone"]["worst"]["bill"]) == (False, None, None)
    assert (by_name[HOSTILE]["live"], by_name[HOSTILE]["state"]) == (True, None)


async def test_a_jobs_processes_and_events(api):
    said = await ask(api, "/api/v1/jobs/gone")
    assert said["processes"] == [
        {
            "process_id": "d" * 32,
            "rank": 0,
            "world_size": 2,
            "local_rank": None,
            "pid": 100,
            "host": "host",
            "node": "n1",
            "live": False,
            "started_us": 5,
            "stopped_us": NOW_US - 5,
            "torch_version": "2.14.1",
            "allocator_conf": None,
            "program": None,
            "first_received_us": NOW_US - 30 * SECOND_US,
            "last_received_us": NOW_US - 30 * SECOND_US,
        }
    ]
    assert said["events"][1] == {
        "process_id": "d" * 32,
        "uuid": UUID,
        "kind": "oom",
        "time_us": NOW_US - 6,
        "received_us": NOW_US - 30 * SECOND_US,
        "requested_bytes": 64,
        "device_total_bytes": None,
        "device_free_bytes": 0,
        "dropped_count": None,
        "message": "CUDA out of memory.",
    }


async def test_a_hostile_name_is_one_part_of_a_path_and_comes_back_as_it_is(api):
    from urllib.parse import quote

    name = quote(HOSTILE, safe="")
    answer = await api.get(f"/api/v1/jobs/{name}")
    assert answer.json()["job"] == HOSTILE
    assert answer.headers["content-type"] == "application/json"
    assert (await api.get(f"/api/v1/jobs/{name}/bill")).json()["job"] == HOSTILE
    assert (await api.get("/api/v1/jobs/train%2Fbill")).status_code == 404


async def test_a_jobs_bill(api):
    said = await ask(api, "/api/v1/jobs/train/bill")
    assert said["job"] == "train"
    [device] = said["devices"]
    assert device["processes"][1] == XORG
    assert (device["node"], device["gpu"], device["uuid"], device["time_us"]) == ("n1", 3, UUID, NOW_US - 7)
    assert sum(line["bytes"] for line in device["bill"]["lines"]) == device["bill"]["total_bytes"] == 1000


async def test_series(api):
    said = await ask(
        api,
        "/api/v1/jobs/train/series",
        metric="allocated_bytes",
        **{"from": NOW_US / 1e6, "to": NOW_US / 1e6 + 10, "step": 2},
    )
    by_rank = {one["rank"]: one for one in said["series"]}
    assert (said["from_us"], said["to_us"], said["step_us"]) == (NOW_US, NOW_US + 10 * SECOND_US, 2 * SECOND_US)
    assert by_rank[0]["points"] == [
        {"time_us": NOW_US, "count": 1, "minimum": 10, "maximum": 10, "mean": 10.0, "last": 10},
        {"time_us": NOW_US + 2 * SECOND_US, "count": 2, "minimum": 20, "maximum": 30, "mean": 25.0, "last": 30},
        {"time_us": NOW_US + 4 * SECOND_US, "count": 1, "minimum": 40, "maximum": 40, "mean": 40.0, "last": 40},
    ]
    assert [point["last"] for point in by_rank[1]["points"]] == [7]
    latest = await ask(api, "/api/v1/jobs/train/series", metric="stranded")
    assert (latest["to_us"], latest["from_us"], latest["step_us"]) == (
        NOW_US + 4 * SECOND_US + 1,
        NOW_US - 896 * SECOND_US + 1,
        3 * SECOND_US,
    )
    assert [point["last"] for one in latest["series"] for point in one["points"]] == [50]


async def test_risks_are_of_those_who_live(api):
    said = await ask(api, "/api/v1/risks")
    assert [(risk["job"], risk["rank"], risk["gpu"], risk["forecast"]["state"]) for risk in said["items"]] == [
        ("train", 0, 3, "critical")
    ]
    everybody = await ask(api, "/api/v1/risks", at_least="ok")
    assert [(risk["rank"], risk["forecast"]["state"]) for risk in everybody["items"]] == [(0, "critical"), (1, "ok")]


async def test_alerts(api):
    said = await ask(api, "/api/v1/alerts", state="firing")
    assert said["items"] == [
        {
            "alert_id": "id1",
            "name": "AllocscopeFragmentationOOMRisk",
            "severity": "critical",
            "state": "firing",
            "cause": "fragmentation",
            "job": "train",
            "at_us": NOW_US + 1,
            "resolved_us": None,
            "updated_us": NOW_US + 2,
            "labels": {"rank": "0"},
            "summary": "s",
            "description": "d",
            "advice": "take another setting",
        }
    ]
    assert [alert["alert_id"] for alert in (await ask(api, "/api/v1/alerts", job="gone"))["items"]] == ["id2"]


async def test_the_fleet(api):
    assert await ask(api, "/api/v1/fleet") == {
        "time_us": NOW_US,
        "nodes": 1,
        "nodes_connected": 1,
        "devices": 1,
        "jobs": 3,
        "jobs_live": 2,
        "jobs_by_state": {"ok": 0, "watch": 0, "at_risk": 0, "critical": 1},
        "device_total_bytes": 1000,
        "bill": {"requested": 450, "stranded": 50, "other_processes": 100, "free": 400},
        "alerts_firing": {"info": 0, "warning": 0, "critical": 1},
    }


@pytest.mark.parametrize("path", ["jobs", "nodes", "alerts", "devices", "risks?at_least=ok"])
async def test_lists_page_by_cursor_and_show_everything_once(api, path):
    whole = (await api.get(f"/api/v1/{path}")).json()["items"]
    paged, cursor = [], None
    while True:
        page = (
            (await api.get(f"/api/v1/{path}", params={"limit": 1, **({"cursor": cursor} if cursor else {})})).json()
            if "?" not in path
            else (await api.get(f"/api/v1/{path}&limit=1" + (f"&cursor={cursor}" if cursor else ""))).json()
        )
        assert len(page["items"]) <= 1
        paged += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(map(json.dumps, paged)) == sorted(map(json.dumps, whole))


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/v1/nothing", 404, "not_found"),
        ("/api/v1/jobs/nobody", 404, "unknown_job"),
        ("/api/v1/jobs/nobody/bill", 404, "unknown_job"),
        ("/api/v1/jobs/nobody/series?metric=allocated_bytes", 404, "unknown_job"),
        ("/api/v1/jobs?limit=0", 422, "bad_parameter"),
        ("/api/v1/jobs?limit=501", 422, "bad_parameter"),
        ("/api/v1/jobs?limit=many", 422, "bad_parameter"),
        ("/api/v1/jobs?cursor=" + "x" * 513, 422, "bad_parameter"),
        ("/api/v1/jobs?cursor=x", 422, "bad_cursor"),
        ("/api/v1/alerts?state=odd", 422, "bad_parameter"),
        ("/api/v1/alerts?job=" + "x" * 513, 422, "bad_parameter"),
        ("/api/v1/risks?at_least=odd", 422, "bad_parameter"),
        ("/api/v1/jobs/train/series", 422, "bad_parameter"),
        ("/api/v1/jobs/train/series?metric=odd", 422, "unknown_metric"),
        ("/api/v1/jobs/train/series?metric=allocated_bytes&to=5000000000", 422, "bad_parameter"),
        ("/api/v1/jobs/train/series?metric=allocated_bytes&step=0", 422, "bad_parameter"),
        ("/api/v1/jobs/train/series?metric=allocated_bytes&from=nan&to=1", 422, "bad_parameter"),
        ("/api/v1/jobs/train/series?metric=allocated_bytes&from=5&to=5", 422, "bad_range"),
        ("/api/v1/jobs/train/series?metric=allocated_bytes&from=5", 422, "bad_range"),
        ("/api/v1/jobs/train/series?metric=allocated_bytes&from=0&to=1800000000&step=1", 422, "too_many_points"),
        ("/static/../api.py", 404, "not_found"),
    ],
)
async def test_what_cannot_be_answered_is_said_in_one_form(api, path, status, code):
    answer = await api.get(path)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], set(error)) == (code, {"code", "message", "details"})
    assert error["message"]


async def test_nothing_but_orders_is_written_over_http(api):
    answer = await api.post("/api/v1/jobs")
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["allow"]) == (
        405,
        "method_not_allowed",
        "GET",
    )


async def test_a_database_that_fails_is_said_and_an_error_of_ours_shows_nothing_of_us():
    from allocscope.storage.errors import StorageBusy

    class Broken:
        captures = None

        def jobs(self, **_):
            raise StorageBusy("the database is busy")

        def nodes(self, **_):
            raise RuntimeError("secret")

    async with client_of(Broken(), failing="no room left") as api:
        busy, ours, ready, alive = [
            await api.get(path) for path in ("/api/v1/jobs", "/api/v1/nodes", "/readyz", "/healthz")
        ]
    assert (busy.status_code, busy.json()["error"]) == (
        503,
        {"code": "storage", "message": "the database is busy", "details": {}},
    )
    assert (ours.status_code, ours.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in ours.text
    assert (ready.status_code, ready.json()["error"]["message"]) == (503, "no room left")
    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/", "/api/v1/jobs", "/static/page.js", "/metrics", "/nowhere", "/openapi.json"])
async def test_every_answer_forbids_what_is_not_ours(api, path):
    headers = (await api.get(path)).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_the_description_bounds_every_parameter(api):
    described = await ask(api, "/openapi.json")
    assert set(described["paths"]) == {
        "/healthz",
        "/readyz",
        "/sd/prometheus",
        "/api/v1/fleet",
        "/api/v1/nodes",
        "/api/v1/devices",
        "/api/v1/jobs",
        "/api/v1/jobs/{job_id}",
        "/api/v1/jobs/{job_id}/bill",
        "/api/v1/jobs/{job_id}/series",
        "/api/v1/jobs/{job_id}/captures",
        "/api/v1/risks",
        "/api/v1/alerts",
        "/api/v1/advice",
        "/api/v1/jobs/{job_id}/advice",
        "/api/v1/captures",
        "/api/v1/captures/{capture_id}",
        "/api/v1/captures/{capture_id}/about",
    }
    for path, methods in described["paths"].items():
        for parameter in (one for method in methods.values() for one in method.get("parameters", [])):
            schema = parameter["schema"]
            kinds = schema.get("anyOf", [schema])
            bounded = [
                kind
                for kind in kinds
                if {"maxLength", "maximum", "enum", "$ref"} & set(kind) or kind.get("type") == "null"
            ]
            assert bounded == kinds or parameter["in"] == "path", (path, parameter)
