"""`allocscope doctor` says what works and what does not, of real daemons in each state, and waits for nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from allocscope.cli import doctor_collector, doctor_machine
from allocscope.cli.doctor_collector import CollectorSight, collector_findings
from allocscope.cli.doctor_daemon import DaemonSight, HttpSight, daemon_findings
from allocscope.cli.doctor_findings import Finding, State, Unfinished, as_text, is_well, judged, look_at_once
from allocscope.cli.doctor_jobs import job_findings
from allocscope.cli.doctor_machine import MachineSight, machine_findings
from allocscope.cli.doctor_nvml import NvmlSight, daemon_nvml_findings, is_switched_off, switched_off_findings
from allocscope.cli.doctor_places import FolderSight, folder_findings, look_at_folder
from allocscope.cli.doctor_socket import SocketSight, look_at_socket, socket_finding
from allocscope.daemon.config import DaemonSettings
from allocscope.daemon.nvml import NvmlRound
from allocscope.daemon.nvml_device import NvmlDevice
from allocscope.daemon.nvml_problems import NvmlProblem, ProblemKind
from tests.daemon.fake_kubelet import Lister, kubelet
from tests.daemon.fakes import DaemonProcess, FakeCollector, FakeProbe, process, sample
from tests.e2e.processes import until

WAIT_S = 60
ROOT = 0
NOBODY = 65534


class Examined:
    """What it said."""

    def __init__(self, ended: subprocess.CompletedProcess[str]) -> None:
        self.status = ended.returncode
        self.told: dict[str, Any] = json.loads(ended.stdout)

    def of(self, about: str) -> list[tuple[str, str]]:
        return [(it["state"], it["text"]) for it in self.told["findings"] if it["about"] == about]

    @property
    def wrong(self) -> list[str]:
        return [f"{it['about']}: {it['text']}" for it in self.told["findings"] if it["state"] == "wrong"]

    def remedy(self, text: str) -> str:
        return next(str(it["do"]) for it in self.told["findings"] if text in it["text"])


def doctor(*arguments: object, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}
    return subprocess.run(
        [sys.executable, "-m", "allocscope.cli", "doctor", *map(str, arguments)],
        env=clean | {"no_proxy": "*"} | (environ or {}),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def settings_of(folder: Path, collector: str = "127.0.0.1:1", metrics: str | None = None) -> Path:
    """A file with the settings of the daemon that lives in this folder."""
    file = folder / "daemon.toml"
    where = f'metrics_listen = "{metrics}"' if metrics else f'addresses_file = "{folder}/addresses.json"'
    file.write_text(
        f'node = "node-1"\nsocket = "{folder}/daemon.sock"\nspool = "{folder}/spool"\ncollector = "{collector}"\n'
        f"{where}\nnvml = false\n"
    )
    return file


def examine(folder: Path, collector: str = "127.0.0.1:1", **options: Any) -> Examined:
    return Examined(doctor("--config", settings_of(folder, collector, **options), "--json"))


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    fake = FakeCollector()
    yield fake
    fake.stop()


def test_a_daemon_that_works_is_well_and_so_is_its_collector(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        collector.wait_for(lambda fake: bool(fake.hellos))
        probe = FakeProbe(daemon.socket, process(job="train"))
        probe.samples(sample(1))
        probe.wait_acknowledged(1)
        until(lambda: daemon.figures("allocscope_processes").get("allocscope_processes") == 1, "the job is seen")
        until(lambda: daemon.figures("allocscope_collector_connected").popitem()[1] == 1, "it is connected")
        seen = examine(tmp_path, collector.address)
        probe.end()
    assert (seen.wrong, seen.status, seen.told["well"]) == ([], 0, True)
    (by_socket, by_http) = seen.of("daemon")
    assert by_socket[0] == "well"
    assert f"pid {daemon.pid} listens for jobs on {tmp_path}/daemon.sock" in by_socket[1]
    assert " and the group " in by_socket[1]
    assert "(0660 " in by_socket[1]
    assert by_http[0] == "well"
    assert f"/metrics at http://{daemon.metrics}" in by_http[1]
    assert by_http[1].startswith("node node-1, version ")
    assert ("well", "train: 1 process reports") in seen.of("jobs")
    assert seen.of("collector") == [("well", f"the daemon is connected to {collector.address}")]
    assert [state for state, _ in seen.of("spool")] == ["well"]
    assert [state for state, _ in seen.of("captures")] == ["well"]
    assert seen.of("nvml") == [("note", "NVML is switched off by the settings (nvml = false)")]


def test_without_a_gpu_all_is_well_where_the_daemon_was_told_so(tmp_path, collector):
    """Who asks need not say it again: a node without a GPU has no fault."""
    with DaemonProcess(tmp_path, collector.address) as daemon:
        collector.wait_for(lambda fake: bool(fake.hellos))
        until(lambda: daemon.figures("allocscope_collector_connected").popitem()[1] == 1, "it is connected")
        settings = settings_of(tmp_path, collector.address)
        settings.write_text(settings.read_text().replace("nvml = false\n", ""))
        seen = Examined(doctor("--config", settings, "--json"))
    assert (seen.wrong, seen.status) == ([], 0)
    [(state, text)] = seen.of("nvml")
    assert state == "note"
    assert text.startswith("the daemon does not read NVML, as it was told (nvml = false)")


def test_without_a_daemon_it_says_so_and_what_to_do(tmp_path):
    seen = examine(tmp_path)
    assert seen.status == 1
    assert seen.of("daemon") == [("wrong", f"no daemon: there is no socket {tmp_path}/daemon.sock")]
    assert "allocscope daemon" in seen.remedy("no daemon")
    assert [state for state, _ in seen.of("spool")] == ["note"], "nobody has made it yet"


def test_a_daemon_that_was_killed_left_its_socket(tmp_path):
    with DaemonProcess(tmp_path) as daemon:
        daemon.kill()
    seen = examine(tmp_path)
    text = f"no daemon: it left its socket {tmp_path}/daemon.sock, and nobody listens there"
    assert seen.of("daemon") == [("wrong", text)]
    assert seen.status == 1


def test_a_daemon_that_hangs_is_told_to_hang(tmp_path):
    with DaemonProcess(tmp_path) as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            seen = examine(tmp_path)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert f"daemon: no answer at http://{daemon.metrics}: it hangs, or is stopped" in seen.wrong
    assert seen.status == 1


def test_a_collector_that_is_away_is_wrong_and_nothing_is_lost(tmp_path):
    with DaemonProcess(tmp_path):
        seen = examine(tmp_path)
    assert seen.wrong == [
        "collector: nothing gets to 127.0.0.1:1: Connection refused; what jobs say waits in the spool, and is kept until that is full"
    ]
    assert seen.status == 1


def test_another_daemon_at_the_address_of_the_metrics_is_noticed(tmp_path, collector):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with DaemonProcess(tmp_path / "a", collector.address), DaemonProcess(tmp_path / "b", collector.address) as other:
        seen = examine(tmp_path / "a", collector.address, metrics=other.metrics)
    assert [text for text in seen.wrong if "has the socket" in text] == [
        f"daemon: the daemon at {other.metrics} has the socket {tmp_path}/b/daemon.sock, and not {tmp_path}/a/daemon.sock"
    ]


def test_what_listens_there_may_be_no_daemon(tmp_path, httpserver, collector):
    httpserver.expect_request("/metrics").respond_with_data("up 1\n")
    with DaemonProcess(tmp_path, collector.address):
        seen = examine(tmp_path, collector.address, metrics=f"127.0.0.1:{httpserver.port}")
    assert (
        "note",
        f"/metrics at http://127.0.0.1:{httpserver.port} answers, and does not say who is on which device",
    ) in (seen.of("daemon"))


def test_a_file_that_is_no_socket_is_told(tmp_path):
    (tmp_path / "daemon.sock").touch()
    assert examine(tmp_path).of("daemon")[0] == ("wrong", f"{tmp_path}/daemon.sock is no socket")


@pytest.mark.skipif(os.geteuid() != ROOT, reason="another user's socket needs another user")
def test_another_users_daemon_cannot_be_connected_to():
    """Not in pytest's folder, which is closed to others; not by the group, which this process keeps."""
    with tempfile.TemporaryDirectory() as name, DaemonProcess(Path(name), socket_mode="0600") as daemon:
        folder = Path(name)
        folder.chmod(0o755)
        open_folder = as_nobody(look_at_socket, daemon.socket)
        folder.chmod(0o700)
        closed_folder = as_nobody(look_at_socket, daemon.socket)
    assert (open_folder.problem, open_folder.mode, open_folder.owner) == ("EACCES", 0o600, "root")
    assert closed_folder == SocketSight(daemon.socket, "EACCES")
    assert socket_finding(open_folder).text == (
        f"you may not connect to {daemon.socket} (0600 root:{open_folder.group}), and neither may your jobs"
    )
    assert socket_finding(closed_folder).text == f"you may not look into {folder}, and neither may your jobs"


def as_nobody(look: Callable[[Path, float], SocketSight], path: Path) -> SocketSight:
    os.seteuid(NOBODY)
    try:
        return look(path, 5)
    finally:
        os.seteuid(ROOT)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--interval-s", "0"),
        ("--no-such-flag",),
        ("--config", "/nowhere/x.toml"),
        ("--within-s", "0"),
        ("--within-s", "x"),
    ],
)
def test_a_wrong_call_is_2(arguments):
    ended = doctor(*arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr


def test_for_people_each_finding_is_a_line_and_its_remedy_another(tmp_path):
    ended = doctor("--config", settings_of(tmp_path))
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    at = lines.index(next(line for line in lines if line.startswith("wrong  daemon")))
    assert lines[at].split(None, 2)[2] == f"no daemon: there is no socket {tmp_path}/daemon.sock"
    assert lines[at + 1].strip().startswith("do: start it")
    assert lines[-1].endswith(" do not work")


def test_it_needs_nothing_but_what_the_daemon_needs():
    code = (
        "import sys\n"
        "for name in ('httpx', 'numpy', 'rich', 'fastapi', 'sqlalchemy', 'torch'): sys.modules[name] = None\n"
        "import allocscope.cli.doctor"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# what hangs or fails


def test_a_look_that_hangs_is_left_and_hides_no_other():
    over = threading.Event()
    try:
        found = look_at_once({"hangs": over.wait, "fails": lambda: 1 // 0, "works": lambda: 7}, 0.05)
    finally:
        over.set()
    assert isinstance(found["hangs"], Unfinished)
    assert isinstance(found["fails"], ZeroDivisionError)
    assert found["works"] == 7
    (hangs,) = judged("spool", found["hangs"], lambda _: [])
    (fails,) = judged("spool", found["fails"], lambda _: [])
    (other_version,) = judged("jobs", {}, job_findings)
    assert (other_version.state, other_version.text) == (
        State.WRONG, "what it says is not understood: KeyError: 'jobs'",
    )  # fmt: skip
    assert (hangs.state, hangs.text) == (State.WRONG, "looking at it hangs: no answer within 0.05 s")
    assert (fails.state, fails.text[:40]) == (State.WRONG, "it cannot be looked at: ZeroDivisionErro")


# what is to be said of what was seen


def runs(**figures: float) -> DaemonSight:
    status = {"node": "n", "version": "1", "socket": "/s", "devices": [], "jobs": []}
    sight = SocketSight(Path("/s"), mode=0o660, owner="root", group="gpu", pid=7)
    return DaemonSight(sight, HttpSight("127.0.0.1:9", status=status, figures=figures), now_s=1_000.0)


BILL, WRITE = "allocscope_bill_last_success_timestamp_seconds", "allocscope_spool_write_last_success_timestamp_seconds"


@pytest.mark.parametrize(
    ("figures", "wrong"),
    [
        pytest.param({BILL: 999.0, WRITE: 999.0}, [], id="all goes well"),
        pytest.param({BILL: 999.0}, [], id="nothing to write yet"),
        pytest.param(
            {BILL: 900.0}, ["making the bills of a node's devices: has not gone well for 100 s"], id="stands still"
        ),
        pytest.param(
            {BILL: 999.0, "allocscope_spool_write_failures_total": 3.0},
            ["writing a batch to the spool's disk, fsync included: has not gone well since it began"],
            id="never went well",
        ),
    ],
)
def test_a_daemon_that_answers_and_does_not_do_its_work_is_wrong(figures, wrong):
    assert [it.text for it in daemon_findings(runs(**figures)) if it.state is State.WRONG] == wrong


def test_what_it_lost_is_a_note():
    lost = {"allocscope_dropped_total samples spool_full": 12.0, "allocscope_dropped_total batches spool_full": 0.0}
    (note,) = [it for it in daemon_findings(runs(**{BILL: 999.0}, **lost)) if it.state is State.NOTE]
    assert note.text == "it lost data since it began: 12 samples spool_full"


@pytest.mark.parametrize(
    ("mode", "who"), [(0o600, "only root"), (0o660, "root and the group gpu"), (0o666, "every user")]
)
def test_who_may_report_is_read_from_the_sockets_mode(mode, who):
    sight = SocketSight(Path("/s"), mode=mode, owner="root", group="gpu", pid=7)
    first = next(daemon_findings(DaemonSight(sight, None, 0.0)))
    assert first.text == f"pid 7 listens for jobs on /s; {who} may report ({mode:04o} root:gpu)"


def test_who_may_not_connect_is_told_whose_it_is():
    sight = SocketSight(Path("/s"), "EACCES", mode=0o660, owner="root", group="gpu")
    first = next(daemon_findings(DaemonSight(sight, None, 0.0)))
    assert first.state is State.WRONG
    assert first.text == "you may not connect to /s (0660 root:gpu), and neither may your jobs"
    assert "join the group gpu" in (first.remedy or "")


def user(
    pid: int, used_bytes: int | None, name: str | None = None, job: str | None = None, **owner: str
) -> dict[str, Any]:
    return {"pid": pid, "name": name, "used_bytes": used_bytes, "job": job, "rank": None, "owner": owner or None}


def test_processes_without_a_probe_are_named_with_their_bytes_and_orphans_are_known_for_such():
    users = [
        user(7, 1 << 30, "train.py", "train"),
        user(8, 3 << 30, "serve", None, user="ann", pod="llm-0"),
        user(9, None, "Xorg"),
        user(4_100_000, 2 << 30),
    ]
    status = {
        "jobs": [{"job": "train"}, {"job": "train"}],
        "devices": [{"gpu": 1, "uuid": "GPU-1", "processes": users}],
    }
    told = [(it.state.value, it.text) for it in job_findings(status)]
    assert told == [
        ("well", "train: 2 processes report"),
        ("note", "pid 8 (serve, of ann in pod llm-0) holds 3.00 GiB of GPU 1 (GPU-1) and has no probe"),
        ("note", "pid 4100000 holds 2.00 GiB of GPU 1 (GPU-1) and has no probe; the daemon sees no such process"),
        ("note", "pid 9 (Xorg) holds, it is not told how much, of GPU 1 (GPU-1) and has no probe"),
    ]


def test_of_many_processes_without_a_probe_the_largest_are_named():
    users = [user(pid, pid << 20, "x") for pid in range(1, 26)]
    found = list(job_findings({"jobs": [], "devices": [{"gpu": 0, "uuid": "GPU-1", "processes": users}]}))
    assert len(found) == 21
    assert found[0].text.startswith("pid 25 (x) holds 25.00 MiB")
    assert found[-1].text == "and 5 more without a probe"


NOT_HERE = NvmlProblem(ProblemKind.NO_LIBRARY, "NVML Shared Library Not Found")


@pytest.mark.parametrize(
    ("here", "text", "remedy"),
    [
        (NvmlRound(problem=NOT_HERE), "; nor could it here: NVML Shared Library Not Found", None),
        (
            NvmlRound((NvmlDevice("GPU-1", 0, "H200"),)),
            ", though 1 device can be read here",
            "take nvml = false out of its settings, and restart it",
        ),
    ],
)
def test_a_daemon_that_was_told_not_to_read_nvml_has_no_fault(here, text, remedy):
    assert [(it.state, it.text, it.remedy) for it in switched_off_findings(NvmlSight(here))] == [
        (State.NOTE, f"the daemon does not read NVML, as it was told (nvml = false){text}", remedy)
    ]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, False),
        ({}, False),
        ({"nvml": None}, False),
        ({"nvml": {"kind": "no_library", "problem": "NVML is switched off"}}, False),
        ({"nvml": {"kind": "not_read", "problem": "NVML has not been read yet"}}, False),
        ({"nvml": {"kind": "not_read", "problem": "NVML is switched off"}}, True),
    ],
)
def test_whether_the_daemon_was_told_so_it_says_itself(status, expected):
    assert is_switched_off(status) is expected


@pytest.mark.parametrize(
    ("nvml", "device", "told"),
    [
        pytest.param(None, None, [], id="well"),
        pytest.param(("not_read", "NVML is switched off"), None, [], id="on purpose"),
        pytest.param(
            ("unknown", "Unknown Error"), "unknown", [("wrong", "the daemon cannot use NVML: Unknown Error")], id="all"
        ),
        pytest.param(None, "lost", [("wrong", "the daemon's GPU 0, H200 (GPU-1): no")], id="one device"),
        pytest.param(None, "not_supported", [("note", "the daemon's GPU 0, H200 (GPU-1): no")], id="not supported"),
        pytest.param(
            None, "of_a_later_version", [("wrong", "the daemon's GPU 0, H200 (GPU-1): no")], id="unknown kind"
        ),
    ],
)
def test_what_the_daemon_cannot_read_though_the_doctor_can(nvml, device, told):
    """It may be in a container that lost its devices."""
    status = {
        "nvml": {"kind": nvml[0], "problem": nvml[1]} if nvml else None,
        "devices": [
            {"gpu": 0, "model": "H200", "uuid": "GPU-1", "problem_kind": device, "problem": "no" if device else None}
        ],
    }
    here = NvmlSight(NvmlRound((NvmlDevice("GPU-1", 0, "H200"),)))
    assert [(it.state.value, it.text) for it in daemon_nvml_findings(status, here)] == told
    assert all(it.remedy for it in daemon_nvml_findings(status, None))


def test_the_kubelet_is_asked(tmp_path):
    pods = tmp_path / "kubelet.sock"
    settings = DaemonSettings(kubelet_socket=pods, pod_logs=tmp_path)
    seen = lambda: look_at_once({"it": partial(doctor_machine.look_at_kubelet, settings, 5)}, WAIT_S)["it"]  # noqa: E731
    assert list(doctor_machine.kubelet_findings(seen())) == []
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(pods))
    (dead_kubelet,) = doctor_machine.kubelet_findings(seen())
    assert dead_kubelet.state is State.NOTE
    assert dead_kubelet.text.startswith(f"the kubelet does not tell of its pods at {pods}")
    pods.unlink()
    with kubelet(pods, lister=Lister()):
        (well,) = doctor_machine.kubelet_findings(seen())
    assert (well.state, well.text) == (State.WELL, f"the kubelet tells which pod has which device, at {pods}")


@pytest.mark.parametrize(
    ("sight", "expected"),
    [
        pytest.param(FolderSight(Path("/s"), bytes=10, free_bytes=1 << 30), ["well"], id="there is room"),
        pytest.param(FolderSight(Path("/s"), bytes=91, free_bytes=1 << 30), ["note"], id="nearly full"),
        pytest.param(FolderSight(Path("/s"), bytes=10, free_bytes=1 << 20), ["well", "wrong"], id="a full disk"),
        pytest.param(FolderSight(Path("/s"), is_there=False), ["wrong"], id="the daemon could not make it"),
        pytest.param(FolderSight(Path("/s"), "Permission denied"), ["note"], id="another user's"),
    ],
)
def test_a_folder(sight, expected):
    assert [it.state.value for it in folder_findings("spool", sight, limit_bytes=100, daemon_runs=True)] == expected


def test_a_folder_is_added_up(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "in" / "b").write_bytes(b"123")
    (tmp_path / "empty").touch()
    os.utime(tmp_path / "a", (1_000, 1_000))
    seen = look_at_folder(tmp_path)
    assert (seen.files, seen.bytes, seen.problem) == (3, 8, None)
    assert (seen.oldest_s or 0) > 1e9
    assert (seen.free_bytes or 0) > 0
    away = look_at_folder(tmp_path / "x" / "y")
    assert (away.is_there, away.problem) == (False, None)


class ClockOff(BaseHTTPRequestHandler):
    """A collector in 2023."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        return "Tue, 14 Nov 2023 22:13:20 GMT"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        """Nothing."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_clock_that_does_not_go_as_the_collectors_is_wrong(monkeypatch):
    with served(ClockOff) as url:
        monkeypatch.setenv("ALLOCSCOPE_URL", url)
        monkeypatch.setattr(doctor_collector, "time", lambda: 1_700_000_100.5)
        seen = doctor_collector.look_at_collector(DaemonSettings(collector="127.0.0.1:1"), 1)
    assert seen == CollectorSight("127.0.0.1:1", "Connection refused", url, skew_s=100.0)
    _, clock = collector_findings(seen, None)
    assert (clock.state, clock.text) == (State.WRONG, f"this clock is 100 s ahead of the collector's, by {url}")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path, Path]]:
    """A collector's port that speaks TLS as localhost, its CA, and another CA."""
    folder = tmp_path_factory.mktemp("tls")
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other.pem")
    mine = ca.issue_cert("localhost")
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    pair = (mine.private_key_pem.bytes(), b"".join(part.bytes() for part in mine.cert_chain_pems))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port, folder / "ca.pem", folder / "other.pem"
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        pytest.param({"collector_ca": "{ca}"}, None, id="well"),
        pytest.param({}, "it speaks TLS, and this daemon does not (collector_ca, or collector_tls)", id="no TLS here"),
        pytest.param({"collector_ca": "{other}"}, "its certificate is not of a CA in {other}", id="another CA"),
        pytest.param(
            {"collector_ca": "/nowhere"}, "cannot read collector_ca /nowhere: No such file", id="no CA's file"
        ),
    ],
)
def test_tls_to_the_collector_is_tried_as_the_daemon_speaks_it(tls, settings, problem):
    port, ca, other = tls
    paths: dict[str, Any] = {name: Path(path.format(ca=ca, other=other)) for name, path in settings.items()}
    seen = doctor_collector.look_at_collector(DaemonSettings(collector=f"localhost:{port}", **paths), 6)
    if problem is None:
        assert seen.problem is None
    else:
        assert (seen.problem or "").startswith(problem.format(other=other))


def test_who_listens_there_may_be_no_collector():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        seen = doctor_collector.look_at_collector(DaemonSettings(collector=f"127.0.0.1:{port}"), 0.6)
    assert seen.problem == "who listens there does not speak gRPC, or hangs"


@pytest.mark.parametrize(
    ("connected", "problem", "state"),
    [
        (True, "Connection refused", State.WELL),
        (None, None, State.WELL),
        (False, None, State.WRONG),
        (False, "Connection refused", State.WRONG),
    ],
)
def test_the_collector_is_well_where_the_daemon_or_the_doctor_reaches_it(connected, problem, state):
    (found,) = collector_findings(CollectorSight("c:1", problem, "http://c:2"), connected)
    assert found.state is state


@pytest.mark.parametrize(
    ("sight", "expected"),
    [
        (MachineSight(True, True, False, Path("/proc"), False), [State.WELL, State.WELL]),
        (MachineSight(False, True, False, Path("/proc"), False), [State.NOTE, State.WELL]),
        (MachineSight(None, False, False, Path("/proc"), False), [State.NOTE]),
        (MachineSight(None, False, False, Path("/host/proc"), False), [State.WELL]),
        (MachineSight(None, True, True, Path("/proc"), False), [State.WRONG]),
        (MachineSight(None, None, False, Path("/proc"), True), [State.WELL, State.WELL]),
    ],
)
def test_the_machine(sight, expected):
    assert [it.state for it in machine_findings(sight)] == expected


def test_where_proc_hides_processes_that_is_found(tmp_path):
    seen = doctor_machine.look_at_machine(DaemonSettings(proc=tmp_path))
    assert seen.hides_processes
    assert not doctor_machine.look_at_machine(DaemonSettings()).hides_processes


def test_what_others_are_called_does_nothing_to_a_terminal():
    assert "\x1b" not in as_text([Finding("jobs", State.NOTE, "pid 7 (\x1b[2Jx)", "\x1b[1m")])


def test_what_is_wrong_decides():
    well, note, wrong = (Finding("x", state, "text", "remedy") for state in State)
    assert is_well([well, note])
    assert not is_well([well, wrong])
    assert as_text([well, wrong]).splitlines() == [
        "well   x  text",
        "          do: remedy",
        "wrong  x  text",
        "          do: remedy",
        "",
        "1 of 2 do not work",
    ]
