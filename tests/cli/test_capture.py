"""`allocscope capture` against a real collector, with a daemon's stand-in that takes the orders."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer

from allocscope.cli.app import main
from allocscope.model import CaptureOrder, CaptureReason, wire
from allocscope.model.tensors import (
    DeviceTensors,
    Holder,
    HolderKind,
    KindTotal,
    StorageRow,
    TensorGroup,
    TensorKind,
    TensorReport,
    View,
)
from tests.collector.harness import START_US, CollectorProcess, batch, collector, process, sample, stream
from tests.collector.uploads import bring, capture, hello, rows, send
from tests.e2e.processes import until

TAKEN = "20231114T221327Z"
VIEW = View((1024, 1024), "float32")
LOSSES = Holder(HolderKind.VARIABLE, "losses[3]", "frame variable 'losses' of train() in train.py", "list of 4", 41)


def report(losses: int, **more: Any) -> TensorReport:
    mib = 1 << 20
    return TensorReport(
        START_US + losses * 1_000_000,
        "cuda",
        took_us=120_000,
        devices=(DeviceTensors(0, 60 * mib, 64 * mib, 4 * mib),),
        totals=(KindTotal(0, TensorKind.PARAMETER, 20 * mib, 5), KindTotal(0, TensorKind.OTHER, 40 * mib, losses)),
        groups=(
            TensorGroup(TensorKind.OTHER, "losses[*]", LOSSES.place, VIEW, losses, losses * 4 * mib),
            TensorGroup(TensorKind.PARAMETER, "model.layers.*.weight", None, VIEW, 5, 20 * mib),
        ),
        rows=(
            StorageRow(0, 4096, 4 * mib, TensorKind.OTHER, 2, (VIEW,), 0, (LOSSES,), 1),
            StorageRow(0, 8192, 2000, TensorKind.GRADIENT, 1, (View((), "float16"),)),
        ),
        more_rows=7,
        more_rows_bytes=mib,
        **more,
    )


def snapshot(number: int, job: str, tensors: TensorReport | None = None) -> bytes:
    """As a probe leaves it."""
    who = process(number, job)
    known = {"process_id": who.process_id, "job": job, "pid": who.pid, "host": who.host, "rank": who.rank}
    told: dict[str, Any] = {"capture_id": "0" * 32, "reason": "asked", "time_us": START_US, "process": known}
    if tensors is not None:
        told["tensors"] = tensors.to_plain()
    block = {"size": 4 << 20, "requested_size": 4 << 20, "address": 4096, "state": "active_allocated", "frames": []}
    segment = {
        "device": 0,
        "address": 4096,
        "total_size": 20 << 20,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [block, {**block, "address": 4096 + (4 << 20), "size": 16 << 20, "state": "inactive"}],
    }
    return pickle.dumps({"segments": [segment], "device_traces": [[]], "allocscope": told}, protocol=4)


class Daemon:
    """Takes the orders of one node, and answers them as a test says."""

    def __init__(self, running: CollectorProcess, job: str, numbers: range) -> None:
        self._running, self.job, self._numbers = running, job, numbers
        self.answer: Callable[[int, str], None] = self.bring
        self.tensors: TensorReport | None = None
        self.orders: list[Any] = []

    def bring(self, number: int, capture_id: str) -> None:
        written = snapshot(number, self.job, self.tensors)
        told = {"reason": CaptureReason.ASKED, "tensors": self.tensors is not None, "history_entries": 1234}
        bring(self._running.grpc, capture_id, number, job=self.job, snapshot=written, **told)

    def fail(self, number: int, capture_id: str) -> None:
        gone = capture(
            capture_id, number, snapshot_bytes=None, reason=CaptureReason.ASKED, problem="it is not there\x1b"
        )
        send(self._running.grpc, [hello(gone, process(number, self.job))])

    def silent(self, number: int, capture_id: str) -> None:
        pass

    def run(self, it: Any) -> None:
        for response in iter(it.next_response, None):
            for order in response.orders:
                told = wire.order_from_wire(order.order)
                assert isinstance(told, CaptureOrder)
                self.orders.append(told)
                self.answer(int(order.process_id, 16), told.capture_id)


@contextmanager
def daemon(running: CollectorProcess, job: str, numbers: range) -> Iterator[Daemon]:
    made = Daemon(running, job, numbers)
    with stream(running.grpc, f"node-{job}") as it:
        for at, number in enumerate(numbers, start=1):
            it.batch(batch(at, sample(1), number=number, job=job))
        it.until(len(numbers))
        answering = threading.Thread(target=made.run, args=(it,), daemon=True)
        answering.start()
        yield made
    answering.join(20)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    with collector(tmp_path_factory.mktemp("collector")) as made:
        yield made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: CollectorProcess) -> Path:
    """An empty folder to stand in, and the collector's address where the command looks for it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ALLOCSCOPE_URL", f"http://{running.http}")
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_job_is_captured_into_a_file_of_its_name(
    running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(running, "one", range(51, 52)) as it:
        assert main(["capture", "one", "--history", "2s", "--entries", "1000"]) == 0
    [order] = it.orders
    assert (order.history_us, order.history_entries, order.tensors, order.device_uuid) == (2_000_000, 1000, False, None)
    said = capsys.readouterr()
    assert said.out == (
        f"one-rank50-{TAKEN}.pickle: one rank 50 on n1, taken 2023-11-14 22:13:27 UTC, 510 bytes, 1,234 entries of history\n"
        f"look into it: allocscope inspect one-rank50-{TAKEN}.pickle\n"
    )
    assert "one rank 50 on node-one: on order; its node was not told yet\n" in said.err
    assert files(here) == [f"one-rank50-{TAKEN}.pickle"]
    assert (here / files(here)[0]).read_bytes() == snapshot(51, "one")
    assert main(["inspect", files(here)[0]]) == 0
    assert capsys.readouterr().out.startswith(
        "a capture of job one, rank 50 (pid 1051 on host), taken 2023-11-14 22:13:20 UTC since somebody asked for it\n\n"
    )
    assert main(["inspect", files(here)[0], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["capture"]
    assert (told["process"]["job"], told["process"]["rank"], told["reason"]) == ("one", 50, "asked")


def test_nothing_is_ever_overwritten(running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.pickle").write_text("mine")
    with daemon(running, "twice", range(52, 53)) as it:
        assert main(["capture", "twice"]) == 0
        assert main(["capture", "twice"]) == 0
        capsys.readouterr()
        assert main(["capture", "twice", "--output", "mine.pickle"]) == 2
        assert capsys.readouterr().err == (
            "allocscope capture: mine.pickle is there already, and is not overwritten: name another file\n"
        )
        assert len(it.orders) == 2, "nobody was asked for what has no place"
    assert files(here) == ["mine.pickle", f"twice-rank51-{TAKEN}-2.pickle", f"twice-rank51-{TAKEN}.pickle"]
    assert (here / "mine.pickle").read_text() == "mine"


def test_all_ranks_go_into_a_folder(running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "folder").mkdir()
    with daemon(running, "many", range(61, 64)) as it:
        assert main(["capture", "many", "--rank", "all", "--output", "x.pickle"]) == 2
        assert "names one file for several captures: name a folder" in capsys.readouterr().err
        assert it.orders == []
        assert main(["capture", "many", "--rank", "all", "--output", "folder"]) == 0
        assert main(["capture", "many", "--rank", "all", "--output", "made/"]) == 0
    for folder in ("folder", "made"):
        assert files(here / folder) == [f"many-rank{rank}-{TAKEN}.pickle" for rank in (60, 61, 62)]


def test_one_that_fails_says_why_and_what_came_is_there_all_the_same(
    running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(running, "half", range(64, 66)) as it:
        it.answer = lambda number, capture_id: (it.bring if number == 64 else it.fail)(number, capture_id)
        assert main(["capture", "half", "--rank", "all"]) == 1
    assert files(here) == [f"half-rank63-{TAKEN}.pickle"]
    assert "half rank 64 on n1: no snapshot\n  it is not there?\n" in capsys.readouterr().out


def test_it_is_ordered_now_and_fetched_later(
    running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(running, "later", range(66, 67)) as it:
        assert main(["capture", "later", "--no-wait", "--json"]) == 0
        [ordered] = json.loads(capsys.readouterr().out)["items"]
        query = "SELECT state FROM captures WHERE capture_id = ?"
        until(lambda: rows(running.database, query, ordered["capture_id"]) == [("kept",)], "it is kept")
        assert main(["capture", "--list", "later"]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert listed[0].split() == [
            "taken",
            "(UTC)",
            "job",
            "rank",
            "node",
            "gpu",
            "why",
            "history",
            "tensors",
            "size",
            "id",
        ]
        assert (
            listed[1].split() == f"2023-11-14 22:13:27 later 65 n1 asked 1234 512 bytes {ordered['capture_id']}".split()
        )
        assert main(["capture", "--id", ordered["capture_id"], "--json"]) == 0
    [fetched] = json.loads(capsys.readouterr().out)["items"]
    assert (fetched["file"], fetched["state"]) == (f"later-rank65-{TAKEN}.pickle", "kept")
    assert files(here) == [fetched["file"]]
    assert len(it.orders) == 1


def test_tensors_are_told_with_who_holds_them_and_what_grew(
    running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(running, "leaks", range(67, 68)) as it:
        it.tensors = report(4)
        assert main(["capture", "leaks", "--tensors", "--output", "before.pickle"]) == 0
        assert it.orders[0].tensors is True
        first = capsys.readouterr().out
        it.tensors = report(54, complete=False, left_out=("2 modules: the time was over",))
        assert main(["capture", "leaks", "--tensors", "--since", "before.pickle", "--output", "after.pickle"]) == 0
        second = capsys.readouterr().out
    assert first.splitlines()[1:] == [
        "",
        "live tensors, looked at within 0.1 s",
        "",
        "device  kind                        storages  size",
        "0       parameter                   5         20.00 MiB",
        "0       other                       4         40.00 MiB",
        "0       held by no Python object              4.00 MiB",
        "0       requested of the allocator            64.00 MiB",
        "",
        "size       storages  kind       shape              held alike by",
        "16.00 MiB  4         other      1024x1024 float32  losses[*] (frame variable 'losses' of train() in train.py)",
        "20.00 MiB  5         parameter  1024x1024 float32  model.layers.*.weight",
        "",
        "size      device  kind      tensors  shapes             held by",
        f"4.00 MiB  0       other     2        1024x1024 float32  {LOSSES.text}, and 1 more",
        "1.95 KiB  0       gradient  1        scalar float16     nobody by name",
        "1.00 MiB                                                7 more",
    ]
    assert "not all: 2 modules: the time was over" in second
    assert second.endswith(
        "what grew in 50 s\n"
        "  losses[*] (1024x1024 float32): +50 tensors, +200.00 MiB, in frame variable 'losses' of train() in train.py\n"
    )
    assert main(["capture", "--read", "after.pickle", "--since", "before.pickle", "--json"]) == 0
    [read] = json.loads(capsys.readouterr().out)["items"]
    assert read["grown"] == [
        {
            "kind": "other",
            "holder": "losses[*]",
            "place": "frame variable 'losses' of train() in train.py",
            "view": "1024x1024 float32",
            "storage_count": 50,
            "bytes": 200 << 20,
        }
    ]
    assert read["tensors_report"]["rows"][0]["holders"][0]["path"] == "losses[3]"
    assert main(["capture", "--read", "before.pickle", "--since", "after.pickle"]) == 0
    assert capsys.readouterr().out.endswith("what grew in -50 s\n  nothing\n")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (pickle.dumps({"segments": [], "device_traces": [], "allocscope": Evil()}), "nothing of it was run"),
        (pickle.dumps({"segments": [], "device_traces": []}, 4), "is no capture of Allocscope"),
        (snapshot(68, "evil"), "tells nothing of tensors: order one with --tensors"),
        (pickle.dumps({"segments": [], "device_traces": [], "allocscope": {"tensors": 5}}, 4), "should be an object"),
        (b"no pickle at all", "is not a pickle, nor JSON"),
    ],
    ids=["hostile", "not ours", "without tensors", "odd tensors", "no pickle"],
)
def test_whatever_came_as_a_snapshot_is_kept_and_never_run(
    running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str], written: bytes, says: str
) -> None:
    with daemon(running, "evil", range(68, 69)) as it:
        it.answer = lambda number, capture_id: bring(running.grpc, capture_id, number, job="evil", snapshot=written)
        assert main(["capture", "evil", "--tensors", "--output", "evil.pickle"]) == 1
    assert says in capsys.readouterr().out
    assert files(here) == ["evil.pickle"]
    assert (here / "evil.pickle").read_bytes() == written
    assert main(["capture", "--read", "evil.pickle"]) == 2
    assert says in capsys.readouterr().err


def test_who_waits_no_longer_is_told_how_to_fetch_it(
    running: CollectorProcess, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon(running, "slow", range(69, 70)) as it:
        it.answer = it.silent
        assert main(["capture", "slow", "--timeout", "0.2s"]) == 1
    assert "no snapshot\n  it has not come yet: fetch it later with --id\n" in capsys.readouterr().out
    assert files(here) == []


def test_an_impatient_one_gets_the_id(running: CollectorProcess, here: Path) -> None:
    with daemon(running, "impatient", range(70, 71)) as it:
        it.answer = it.silent
        asking = subprocess.Popen(
            [sys.executable, "-m", "allocscope.cli", "capture", "impatient"], stderr=subprocess.PIPE, text=True
        )
        with asking:
            try:
                assert asking.stderr is not None
                assert "impatient" in asking.stderr.readline()  # from here on it waits
                until(lambda: it.orders, "it is ordered")
                asking.send_signal(signal.SIGINT)
                _, said = asking.communicate(timeout=60)
            finally:
                asking.kill()
    assert asking.returncode == 130
    assert said.endswith(
        f"it is still on order; fetch it later:\n  allocscope capture --id {it.orders[0].capture_id}\n"
    )


def test_a_collector_that_restarts_meanwhile_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with collector(tmp_path) as first:
        listen = (f"--http-listen={first.http}", f"--grpc-listen={first.grpc}")
        with daemon(first, "restart", range(71, 72)) as it:
            it.answer = it.silent
            output = ["--output", str(tmp_path / "x.pickle"), "--url", first.http]
            asking = threading.Thread(target=lambda: statuses.append(main(["capture", "restart", *output])))
            statuses: list[int] = []
            asking.start()
            until(lambda: it.orders, "it is ordered")
        first.stop()
    with collector(tmp_path, *listen) as second, daemon(second, "restart", range(71, 72)):
        asking.join(60)
    assert statuses == [0]
    assert (tmp_path / "x.pickle").read_bytes() == snapshot(71, "restart")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name the job to capture, or --list, --id or --read"),
        (["x", "--id", "y"], "with --id or --read no job is named"),
        (["--list", "--id", "y"], "--list, --id and --read exclude one another"),
        (["x", "--since", "f"], "--since compares tensors: it needs --tensors"),
        (["x", "--no-wait", "--output", "f"], "with --no-wait nothing is fetched"),
        (["x", "--rank", "first"], "'first' is not a rank, nor all"),
        (["x", "--history", "soon"], "'soon' is not a time, such as 20s or 5m"),
    ],
)
def test_a_wrong_call_is_told(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["capture", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["nobody"], 1, "allocscope: no reports of job 'nobody'"),
        (["--id", "x"], 1, "allocscope: there is no capture 'x'"),
        (["--id", "../jobs"], 1, "allocscope: "),
        (["x", "--output", "no/such/folder/x"], 2, "allocscope capture: there is no folder no/such/folder"),
        (
            ["x", "--tensors", "--since", "gone.pickle"],
            2,
            "allocscope capture: gone.pickle: cannot be read (No such file or directory)",
        ),
        (["x", "--url", "http://127.0.0.1:1"], 1, "allocscope: no collector answers at http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_asked_for_is_told(
    here: Path, arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capture", *arguments]) == status
    assert capsys.readouterr().err.startswith(says)
    assert files(here) == []


def test_a_download_that_breaks_leaves_no_file(
    httpserver: HTTPServer, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {
        **dict.fromkeys(("rank", "time_us", "history_entries", "problem", "file_name")),
        "capture_id": "a" * 32,
        "state": "kept",
        "snapshot_bytes": 100,
        "job": "x",
        "node": "n",
    }
    path = f"/api/v1/captures/{'a' * 32}"
    httpserver.expect_request(f"{path}/about").respond_with_json(about)
    httpserver.expect_oneshot_request(path).respond_with_data(b"x" * 99)
    httpserver.expect_oneshot_request(path).respond_with_data(
        gzip.compress(os.urandom(100))[:-20], headers={"content-encoding": "gzip"}
    )
    httpserver.expect_oneshot_request(path).respond_with_json(
        {"error": {"code": "snapshot_dropped", "message": "gone"}}, 410
    )
    for says in ("99 bytes came of 100: fetch it again", "", "gone"):
        assert main(["capture", "--id", "a" * 32, "--url", httpserver.url_for("/")]) == 1
        assert says in capsys.readouterr().out
        assert files(here) == []


def test_a_full_disk_leaves_no_file(running: CollectorProcess, here: Path) -> None:
    with daemon(running, "large", range(72, 73)) as it:
        big = os.urandom(3 << 20)
        it.answer = lambda number, capture_id: bring(running.grpc, capture_id, number, job="large", snapshot=big)
        limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
        code = f"{limited}; from allocscope.cli.app import main; raise SystemExit(main(['capture', 'large']))"
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (asked.returncode, "cannot be written: File too large" in asked.stdout) == (1, True), asked
    assert files(here) == []
