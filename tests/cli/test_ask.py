"""Questions to a collector: answered in columns or as JSON; what went wrong is said with what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pytest_httpserver import HTTPServer

from allocscope.cli.app import main
from allocscope.cli.ask import columns

FORECAST = {
    "state": "critical",
    "cause": "leak",
    "headroom_bytes": 3 * 2**30,
    "request_bytes": 200 * 2**20,
    "seconds_to_oom": 250.0,
    "summary": "live memory that nothing frees grows",
}
JOB = {
    "job": "llama",
    "nodes": ["n1", "n2"],
    "allocators_live": 2,
    "live": True,
    "state": "critical",
    "cause": "leak",
    "worst": {"forecast": FORECAST},
}
ENDED = {
    "job": "bert",
    "nodes": ["n1"],
    "allocators_live": 0,
    "live": False,
    "state": None,
    "cause": None,
    "worst": None,
}


def asked(httpserver: HTTPServer, path: str, query: dict[str, str], body: dict[str, Any]) -> None:
    httpserver.expect_oneshot_request(f"/api/v1/{path}", query_string=query).respond_with_json(body)


def test_jobs_of_all_pages_are_told(httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked(httpserver, "jobs", {"limit": "100"}, {"items": [JOB], "next_cursor": "more"})
    asked(httpserver, "jobs", {"limit": "100", "cursor": "more"}, {"items": [ENDED], "next_cursor": None})
    assert main(["jobs", "--url", httpserver.url_for("/")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job    nodes  ranks  state     cause  headroom  largest request  left",
        "llama  n1,n2  2      critical  leak   3.00 GiB  200.00 MiB       4 min",
        "bert   n1     0      ended",
    ]


def test_a_bill_says_whose_each_line_is_and_what_is_not_exact(
    httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"line": "requested", "bytes": 60 * 2**20, "exact": True, "job": "a/b", "rank": 0, "process_id": "p"},
        {"line": "free", "bytes": 40 * 2**20, "exact": False, "job": None, "rank": None, "process_id": None},
    ]
    device = {"node": "n1", "gpu": 3, "bill": {"total_bytes": 100 * 2**20, "lines": lines}}
    asked(httpserver, "jobs/a/b/bill", {}, {"job": "a/b", "devices": [device]})
    assert main(["bill", "a/b", "--url", httpserver.url_for("/")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "node  gpu  line       whose       bytes      size",
        "n1    3    requested  a/b rank 0  62914560   60.00 MiB",
        "n1    3    free                   41943040   40.00 MiB, about",
        "n1    3    total                  104857600  100.00 MiB",
    ]


def uses(name: str | None, owner: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    known = {"pid": 9, "name": name, "used_bytes": 2**30, "process_id": None, "job": None, "rank": None}
    return {**known, "owner": owner, **more}


POD = {"pod": "llama-worker-0", "namespace": "team-a", "container": "trainer", "container_id": "a8" * 32, "user": "ann"}
WITH_PROBE: dict[str, Any] = {"process_id": "p", "job": "llama", "rank": 3}


def test_devices_are_told_with_whose_the_processes_on_them_are(
    httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = [
        uses("train.py", POD, **WITH_PROBE),
        uses("x\x1b[2J", {"container_id": "a8" * 32}, used_bytes=None),
        uses("python3", {"slurm_job": "8812", "slurm_step": "0", "user": "an\nn"}, pid=None),
        uses(None, {"pod_uid": "0c5d5f2a", "container": "main"}),
        uses("Xorg"),
    ]
    lost = {"node": "n1", "gpu": 4, "processes": [], "problem": "GPU is lost"}
    body = {"items": [{"node": "n1", "gpu": 3, "processes": processes, "problem": None}, lost], "next_cursor": None}
    asked(httpserver, "devices", {"limit": "100", "node": "n1"}, body)
    assert main(["devices", "--node", "n1", "--url", httpserver.url_for("/")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "node  gpu  pid  process   job           uses      whose",
        "n1    3    9    train.py  llama rank 3  1.00 GiB  pod team-a/llama-worker-0 (trainer), user ann",
        "n1    3    9    x?[2J     no probe      –         container a8a8a8a8a8a8",
        "n1    3         python3   no probe      1.00 GiB  Slurm 8812.0, user an?n",
        "n1    3    9              no probe      1.00 GiB  pod 0c5d5f2a (main)",
        "n1    3    9    Xorg      no probe      1.00 GiB",
        "n1    4                                           GPU is lost",
    ]


@pytest.mark.parametrize(
    ("others", "named"),
    [
        pytest.param([uses("python3", {"user": "ann"}), uses(None, pid=7)], "python3 (user ann), pid 7", id="two"),
        pytest.param([uses(letter) for letter in "abcde"], "a, b, c and 2 more", id="the largest"),
        pytest.param([], "", id="nobody that is known"),
    ],
)
def test_a_bill_names_the_processes_without_a_probe(httpserver: HTTPServer, capsys, others, named) -> None:
    line = {"line": "other_processes", "bytes": 3 * 2**30, "exact": True, "job": None, "rank": None, "process_id": None}
    bill = {"total_bytes": 3 * 2**30, "lines": [line]}
    device = {"node": "n1", "gpu": 3, "bill": bill, "processes": [uses("train.py", **WITH_PROBE), *others]}
    asked(httpserver, "jobs/llama/bill", {}, {"job": "llama", "devices": [device]})
    assert main(["bill", "llama", "--url", httpserver.url_for("/")]) == 0
    told = capsys.readouterr().out.splitlines()[1].split("  ")
    assert [cell.strip() for cell in told if cell] == [
        cell for cell in ("n1", "3", "other_processes", named, "3221225472", "3.00 GiB") if cell
    ]


def test_risks_and_alerts_come_with_their_reasons(httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    risk = {"job": "llama", "rank": 1, "node": "n1", "gpu": None, "forecast": FORECAST}
    alert = {
        "name": "AllocscopeMemoryLeak",
        "severity": "critical",
        "state": "firing",
        "at_us": 1_700_000_000_000_000,
        "resolved_us": None,
        "summary": "why",
    }
    asked(httpserver, "risks", {"at_least": "watch", "limit": "100"}, {"items": [risk], "next_cursor": None})
    asked(httpserver, "alerts", {"job": "llama", "limit": "100"}, {"items": [alert], "next_cursor": None})
    assert main(["risks", "--url", httpserver.url_for("/")]) == 0
    assert (
        "llama  1     n1         critical  leak   4 min  live memory that nothing frees grows"
        in capsys.readouterr().out
    )
    assert main(["alerts", "--job", "llama", "--url", httpserver.url_for("/")]) == 0
    assert "2023-11-14 22:13:20         critical  firing  AllocscopeMemoryLeak  why" in capsys.readouterr().out


def test_json_is_what_the_api_gives(httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    asked(httpserver, "jobs", {"limit": "100"}, {"items": [JOB], "next_cursor": None})
    assert main(["jobs", "--json", "--url", httpserver.url_for("/")]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": [JOB]}


def test_a_refusal_is_told_in_the_collectors_words(httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    error = {"error": {"code": "unknown_job", "message": "no reports of job 'x'"}}
    httpserver.expect_oneshot_request("/api/v1/jobs/x/bill").respond_with_json(error, status=404)
    assert main(["bill", "x", "--url", httpserver.url_for("/")]) == 1
    assert capsys.readouterr().err == "allocscope: no reports of job 'x'\n"


def test_host_and_port_will_do_and_a_list_of_nothing_says_so(
    httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(httpserver, "alerts", {"limit": "100"}, {"items": [], "next_cursor": None})
    assert main(["alerts", "--url", f"{httpserver.host}:{httpserver.port}"]) == 0
    assert capsys.readouterr().out.splitlines() == ["since (UTC)  until  severity  state  alert  why", "(none)"]


@pytest.mark.parametrize(
    ("url", "asked_at"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1"),
        ("127.0.0.1:1", "http://127.0.0.1:1"),
        ("not a url", "http://not a url"),
        ("http://[::1", "http://[::1"),
    ],
)
def test_where_no_collector_answers_it_says_how_to_name_one(
    url: str, asked_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", "--url", url]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"allocscope: no collector answers at {asked_at} (")
    assert said.endswith("; name it with --url or ALLOCSCOPE_URL\n")


def test_columns_are_as_wide_as_what_is_in_them_but_the_last() -> None:
    assert columns([("a", "b"), ("long", "x")]) == "a     b\nlong  x"


def test_on_a_terminal_what_begins_too_late_in_a_long_row_goes_below_it() -> None:
    rows = [
        ("since", "state", "alert", "why"),
        ("12:00:00", "firing", "AllocscopeOOM", "376 MiB were asked for, 233 MiB were free"),
        ("12:01:00", "firing", "", ""),
    ]
    assert columns(rows, 40).splitlines() == [
        "since     state   alert          why",
        "12:00:00  firing  AllocscopeOOM",
        "    376 MiB were asked for, 233 MiB were",
        "      free",
        "12:01:00  firing",
    ]
    assert columns(rows, 30).splitlines() == [
        "since     state",
        "    alert  why",
        "12:00:00  firing",
        "    AllocscopeOOM  376 MiB",
        "      were asked for, 233 MiB",
        "      were free",
        "12:01:00  firing",
    ]
