"""`allocscope advise` against a real collector that really replays; what it prints, word for word, against a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer

from allocscope.cli.app import main
from allocscope.model import CaptureReason
from tests.cli.test_capture import Daemon, daemon
from tests.collector.harness import CollectorProcess, batch, collector, sample, stream
from tests.collector.replayed import holey, pickled
from tests.collector.uploads import bring, new_id

TRIAL = {
    "change": None, "failed_at": None, "failed_us": None, "num_alloc_retries": 0, "num_device_free": 0,
    "needed_bytes": None, "blocked": None, "stranded_peak_bytes": 0,
}  # fmt: skip
ADVICE: dict[str, Any] = {
    "capture_id": "c1", "job_id": "llama", "job": "llama", "rank": 3, "process_id": "p", "node": "n7", "gpu": 2,
    "uuid": "GPU-3f", "made_us": 1_700_000_000_000_000, "kind": "setting",
    "summary": "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: all is served.",
    "conf": "expandable_segments:True", "change": None, "gains": ["it does not run out"],
    "costs": ["more calls to the driver"], "hazards": ["max_split_size_mb\x1b is ignored"], "is_exact": True,
    "exactness": "exact: all is explained", "torch_version": "2.14.1", "requests": 12_345,
    "trials": [
        {**TRIAL, "conf": "", "failed_at": 12_344, "num_alloc_retries": 1, "num_device_alloc": 9, "num_device_free": 3,
         "reserved_peak_bytes": 2_000 << 20, "allocated_peak_bytes": 1_000 << 20, "stranded_peak_bytes": 900 << 20},
        {**TRIAL, "conf": "expandable_segments:True", "needed_bytes": 1_100 << 20, "num_device_alloc": 99,
         "reserved_peak_bytes": 1_200 << 20, "allocated_peak_bytes": 1_150 << 20},
        {**TRIAL, "conf": "max_split_size_mb:64", "change": "buckets:8", "blocked": "not with a MemPool",
         "num_device_alloc": 9, "reserved_peak_bytes": 1_200 << 20, "allocated_peak_bytes": 1_150 << 20},
    ],
}  # fmt: skip
TEXT = """\
llama rank 3 on n7, GPU 2, 2023-11-14 22:13:20 UTC: setting
  Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: all is served.
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  it gains: it does not run out
  it costs: more calls to the driver
  to be known: max_split_size_mb? is ignored
  12,345 recorded requests, by the rules of PyTorch 2.14.1; exact: all is explained
  settings                   needs   reserved   stranded flushes  calls fails at
  default (as recorded)          –   1.95 GiB 900.00 MiB       1     12   12,344
  expandable_segments:True
                          1.07 GiB   1.17 GiB    0 bytes       0     99        –
  max_split_size_mb:64 with buckets:8 (1)
                                 –   1.17 GiB    0 bytes       0      9        –
  (1) not advised: not with a MemPool
"""


def answer(**more: Any) -> dict[str, Any]:
    return {"job": "llama", "items": [], "next_cursor": None, "under_way": [], "is_made_here": True, **more}


@pytest.fixture
def fake(httpserver: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> HTTPServer:
    monkeypatch.setenv("ALLOCSCOPE_URL", httpserver.url_for("/"))
    return httpserver


def test_advice_is_told_with_its_gains_costs_hazards_and_trials(fake, capsys):
    older = {**ADVICE, "summary": "of before"}
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(answer(items=[ADVICE, older]))
    assert main(["advise", "llama"]) == 0
    assert capsys.readouterr().out == TEXT


def test_the_table_is_no_wider_than_80_columns_and_what_is_not_advised_for_one_reason_has_one_note(fake, capsys):
    much = {"needed_bytes": 140 << 30, "reserved_peak_bytes": 188 << 30, "stranded_peak_bytes": 101 << 30}
    many = {"num_alloc_retries": 123_456, "num_device_alloc": 54_321, "failed_at": 999_999}
    blocked = {**ADVICE["trials"][2], "change": None}
    trials = [
        {**ADVICE["trials"][0], **much, **many},
        {**blocked, **much, "conf": "expandable_segments:True,roundup_power2_divisions:16"},
        {**blocked, **much},
        {**blocked, **much, "conf": "max_split_size_mb:9", "blocked": "for another reason"},
    ]
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(answer(items=[{**ADVICE, "trials": trials}]))
    assert main(["advise", "llama"]) == 0
    said = capsys.readouterr().out
    assert (
        said.split("is explained\n")[1]
        == """\
  settings                   needs   reserved   stranded flushes  calls fails at
  default (as recorded) 140.00 GiB 188.00 GiB 101.00 GiB 123,456 54,324  999,999
  expandable_segments:True,roundup_power2_divisions:16 (1)
                        140.00 GiB 188.00 GiB 101.00 GiB       0      9        –
  max_split_size_mb:64 (1)
                        140.00 GiB 188.00 GiB 101.00 GiB       0      9        –
  max_split_size_mb:9 (2)
                        140.00 GiB 188.00 GiB 101.00 GiB       0      9        –
  (1) not advised: not with a MemPool
  (2) not advised: for another reason
"""
    )


def test_an_estimate_says_so_and_what_is_not_known_is_blank(fake, capsys):
    one = {
        **ADVICE,
        "is_exact": False,
        "exactness": "",
        "torch_version": "",
        "gpu": None,
        "rank": None,
        "trials": [ADVICE["trials"][0]],
    }
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(answer(items=[one]))
    assert main(["advise", "llama"]) == 0
    said = capsys.readouterr().out
    assert "llama on n7, GPU-3f, 2023" in said
    assert "12,345 recorded requests, by PyTorch's rules; an estimate\n" in said


def test_one_that_could_not_be_made_says_why_and_nothing_else(fake, capsys):
    one = {**ADVICE, "kind": "unknown", "summary": "the replay was ended by SIGKILL", "trials": [], "conf": None}
    one |= {"gains": [], "costs": [], "hazards": []}
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(answer(items=[one]))
    assert main(["advise", "llama"]) == 0
    assert capsys.readouterr().out == (
        "llama rank 3 on n7, GPU 2, 2023-11-14 22:13:20 UTC: unknown\n  the replay was ended by SIGKILL\n"
    )


def test_the_newest_of_each_rank_is_told(fake, capsys):
    items = [{**ADVICE, "rank": rank, "summary": f"{rank} {age}", "trials": []} for age in "ab" for rank in (0, 1)]
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(answer(items=items))
    assert main(["advise", "llama"]) == 0
    said = capsys.readouterr().out
    assert [words for words in ("0 a", "1 a", "0 b", "1 b") if words in said] == ["0 a", "1 a"]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (answer(), "no advice: it comes of a replay of the job's requests"),
        (answer(), ", or now: allocscope advise llama --fresh\n"),
        (answer(job="my job"), ", or now: allocscope advise 'my job' --fresh\n"),
        (answer(is_made_here=False), "this collector itself replays nothing (its setting `advice` is false)"),
        (answer(under_way=[{"capture_id": "c"}]), "no advice yet; it is on its way: allocscope advise llama --wait"),
    ],
)
def test_where_there_is_none_it_says_how_to_get_some(fake, capsys, told, says):
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(told)
    assert main(["advise", "llama"]) == 1
    assert says in capsys.readouterr().out


def test_who_waits_is_told_what_for_and_gets_what_comes(fake, capsys):
    under_way = {"capture_id": "c1", "rank": 3, "node": "n7", "uuid": "GPU-3f", "reason": "forecast", "state": "sent"}
    for told in (
        answer(under_way=[under_way]),
        answer(under_way=[{**under_way, "state": "kept"}]),
        answer(items=[ADVICE]),
    ):
        fake.expect_ordered_request("/api/v1/jobs/llama/advice").respond_with_json(told)
    assert main(["advise", "llama", "--wait"]) == 0
    said = capsys.readouterr()
    assert said.out == TEXT
    assert said.err == (
        "rank 3 on n7: its node was told; the snapshot is being taken, or on its way\n"
        "rank 3 on n7: the snapshot is here; its requests are replayed under other settings\n"
    )


def test_waiting_ends(fake, capsys):
    under_way = {"capture_id": "c1", "rank": None, "node": "n7", "uuid": None, "reason": "forecast", "state": "kept"}
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(answer(under_way=[under_way]))
    assert main(["advise", "llama", "--wait", "--timeout", "0"]) == 1
    assert "no advice yet" in capsys.readouterr().out


def test_where_nobody_replays_nothing_is_ordered(fake, capsys):
    fake.expect_request("/api/v1/jobs/llama/advice").respond_with_json(answer(is_made_here=False))
    assert main(["advise", "llama", "--fresh"]) == 1
    assert "replays nothing: its setting `advice` is false" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["j", "--rank", "all"],
        ["j", "--history", "5s"],
        ["j", "--timeout", "5s"],
        ["j", "--fresh", "--history", "x"],
    ],
)
def test_a_wrong_call_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["advise", *arguments])
    assert ended.value.code == 2
    assert "usage: allocscope advise" in capsys.readouterr().err


# a real collector, and real replays


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    with collector(tmp_path_factory.mktemp("collector")) as made:
        yield made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, running: CollectorProcess) -> None:
    monkeypatch.setenv("ALLOCSCOPE_URL", f"http://{running.http}")


def reported(running: CollectorProcess, job: str, number: int) -> None:
    with stream(running.grpc, f"node-{job}") as it:
        it.batch(batch(1, sample(1), number=number, job=job))
        it.until(1)


def test_a_capture_that_comes_is_replayed_and_advises(running, here, capsys):
    reported(running, "holes", 1)
    bring(running.grpc, new_id(), 1, job="holes", snapshot=pickled(holey()), reason=CaptureReason.FORECAST)
    assert main(["advise", "holes", "--wait", "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["items"]
    assert (one["kind"], one["rank"], one["uuid"]) == ("setting", 0, "GPU-1")
    assert "expandable_segments:True" in one["conf"]
    assert one["trials"][0]["failed_at"] is not None
    assert main(["advise", "holes", "--rank", "0"]) == 0
    assert "expandable_segments:True" in capsys.readouterr().out
    assert main(["advise", "holes", "--rank", "5"]) == 1


def test_a_fresh_one_is_recorded_replayed_and_waited_for(running, here, capsys):
    with daemon(running, "fresh", range(1, 2)) as it:
        it.answer = lambda number, capture_id: bring(
            running.grpc, capture_id, number, job="fresh", snapshot=pickled(holey()), reason=CaptureReason.ASKED
        )
        assert main(["advise", "fresh", "--fresh", "--history", "2s", "--json"]) == 0
        [order] = it.orders
    assert (order.history_us, order.reason) == (2_000_000, CaptureReason.ASKED)
    said = capsys.readouterr()
    [one] = json.loads(said.out)["items"]
    assert (one["capture_id"], one["kind"]) == (order.capture_id, "setting")
    assert "rank 0 on" in said.err


def without_history(it: Daemon) -> None:
    it.answer = lambda number, capture_id: bring(
        it._running.grpc, capture_id, number, job="fresh", history_entries=0, reason=CaptureReason.ASKED,
        problem="the program records a history of its own",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("answering", "says"),
    [
        (lambda it: setattr(it, "answer", it.fail), "nothing can be replayed: it is not there?"),
        (without_history, "nothing can be replayed: the program records a history of its own"),
    ],
)
def test_one_that_nothing_comes_of_says_why(running, here, capsys, answering, says):
    with daemon(running, "fresh", range(1, 2)) as it:
        answering(it)
        assert main(["advise", "fresh", "--fresh"]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("job", ["nobody", "..", ".", "a/../b", "%2E%2E"])
@pytest.mark.parametrize("command", ["advise", "bill"])
def test_a_job_that_nobody_reported_is_not_known_whatever_its_name(here, capsys, command, job):
    assert main([command, job]) == 1
    assert f"no reports of job '{job}'" in capsys.readouterr().err


def test_nobody_there_is_said(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setenv("ALLOCSCOPE_URL", "http://127.0.0.1:9")
    assert main(["advise", "llama", "--wait"]) == 1
    assert "no collector answers at http://127.0.0.1:9" in capsys.readouterr().err
