"""One situation, judged twice: by a collector itself, and by a Prometheus with the shipped rules that scrapes it. Both say the
same at about the same time, and of one incident there is one page.

Eight nodes with eight ranks each of a job whose memory grows until one of them dies of it, and a healthy job beside them, all as
recorded but ten times as fast; so the rules' times are a tenth, where they are the job's. A node is silent, and another has
lost data.
"""

from __future__ import annotations

import http.server
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import allocscope.cli
from allocscope.alerts.prometheus.documents import rule_file
from allocscope.alerts.prometheus.shipped import RULES_FILE, headed
from allocscope.allocator.player import Player, Seen
from allocscope.allocator.recording import Recording, read_recording
from allocscope.model import AllocatorRef, BlockMap, Device, Event, EventKind, Process, Sample, chunks, wire
from allocscope.proto.v1 import collector_service_pb2 as messages
from allocscope.storage.sql import open_repository
from tests.alerts.conftest import Receiver
from tests.alerts.servers import AlertmanagerServer, PrometheusServer
from tests.alerts.stories import until
from tests.collector.harness import CollectorProcess, Stream, collector, now_us, stream
from tests.needs import REPO

SPEED = 10
QUIET_S = 150
"""Of recorded time: what is told at once, since nothing comes of it yet."""
NODES, RANKS_A_NODE = 8, 8
FIRST_TO_GO = 41
AHEAD_S = 30
"""Of recorded time: by so much the first rank's recording is ahead of the others'."""
RUNBOOK = "https://docs.example"
GROWS, HEALTHY = "curriculum-2-2200", "steady-1-2216"
LATE_S = 8.0
"""How far apart the two may be: a scrape, an evaluation and a poll each, and what a busy machine adds to them."""

Key = tuple[tuple[str, str], ...]
EXPECTED = {
    ("AllocscopeMemoryGrowth", "critical", "llama"),
    ("AllocscopeMemoryGrowth", "warning", "llama"),
    ("AllocscopeMemoryGrowth", "info", "llama"),
    ("AllocscopeAllocatorThrashing", "warning", "llama"),
    ("AllocscopeOOM", "warning", "llama"),
    ("AllocscopeNodeSilent", "warning", "gone"),
    ("AllocscopeDroppingData", "warning", "n0"),
}


def faster(configuration: str, what: str = r"\w+") -> str:
    """With a tenth of these times."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * {"s": 1, "m": 60, "h": 3600}[found[3]]
        return f"{found[1]}{seconds * 1000 // SPEED}ms"

    return re.sub(rf"(?m)^( +(?:- )?(?:{what}): )(\d+)([smh])(?= *(?:#|$))", shorter, configuration)


def rules() -> str:
    """The shipped ones. What goes by the collector's clock, not the job's, keeps its window."""
    quick = faster(headed(rule_file(runbook_address=RUNBOOK)))
    assert quick.count(" for: 1000ms") == 5
    window = f"{300 // SPEED}s"
    return re.sub(r"(?m)^.*allocscope_alloc_retries_total.*$", lambda line: line[0].replace("5m", window), quick)


def alertmanager_configuration(receiver: Receiver, name: str) -> str:
    """The example, with receivers. It waits less for a group to gather, and as long as ever before it tells of it again."""
    example = faster((REPO / "deploy" / "alertmanager" / "alertmanager.yml").read_text(), "group_wait")
    for who in ("pager", "chat", "nobody"):
        hook = f'webhook_configs: [{{url: "{receiver.address}/{name}/{who}", max_alerts: 0}}]'
        example, found = re.subn(rf"(?m)^  - name: {who}\b.*$", f"  - name: {who}\n    {hook}", example)
        assert found == 1
    return example


def prometheus_configuration(collector: CollectorProcess, alertmanagers: list[AlertmanagerServer]) -> str:
    example = faster((REPO / "deploy" / "prometheus" / "prometheus.yml").read_text())
    targets = ", ".join(f'"{one.address.removeprefix("http://")}"' for one in alertmanagers)
    assert example.count('["127.0.0.1:9093"]') == 1
    return example.replace('["127.0.0.1:9093"]', f"[{targets}]").replace("127.0.0.1:9464", collector.http)


# what happens


class DaemonMetrics:
    """The /metrics of a node's daemon, as far as rules look at it."""

    def __init__(self) -> None:
        self.lost = 0
        daemon = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = ['allocscope_build_info{version="1"} 1']
                if daemon.lost:
                    lines.append(f'allocscope_dropped_total{{what="batches",reason="spool_full"}} {daemon.lost}')
                body = "".join(f"{line}\n" for line in lines).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(BrokenPipeError):  # Prometheus did not wait
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as it is called there)
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()


@dataclass
class Rank:
    """One process that behaves as recorded."""

    process: Process
    items: list[Seen]
    at: int = 0

    @property
    def ref(self) -> AllocatorRef:
        return AllocatorRef(self.process.process_id, self.process.devices[0].uuid)

    def until(self, time_us: int) -> list[Seen]:
        """What it says next, up to this moment of the recording."""
        first = self.at
        while self.at < len(self.items) and self.items[self.at].time_us <= time_us:
            self.at += 1
        return self.items[first : self.at]


def rank(recording: Recording, seen: list[Seen], number: int, job: str, *, ahead_s: int = 0) -> Rank:
    process = Process(
        f"{number:032x}",
        job,
        1000 + number,
        "host",
        recording.start_us,
        rank=number,
        devices=(Device(f"GPU-{job}-{number}", number % RANKS_A_NODE, "H200", recording.device_total_bytes),),
        allocator_conf=recording.conf,
    )
    return Rank(process, [replace(item, time_us=item.time_us - ahead_s * 1_000_000) for item in seen])


@dataclass
class Node:
    """A daemon's side of a collector's stream."""

    stream: Stream
    ranks: list[Rank]
    sequence: int = 0

    def tell(self, time_us: int) -> None:
        """A batch of what its ranks have said up to this moment."""
        said = [(one, one.until(time_us)) for one in self.ranks]
        if not any(items for _, items in said):
            return
        self.sequence += 1
        batch = messages.Batch(sequence=self.sequence, closed_us=now_us())
        batch.processes.extend(wire.process_to_wire(one.process) for one in self.ranks)
        for one, items in said:
            samples = [item for item in items if isinstance(item, Sample)]
            batch.samples.extend(wire.chunk_to_wire(chunk) for chunk in chunks(one.ref, samples))
            batch.block_maps.extend(wire.block_map_to_wire(one.ref, i) for i in items if isinstance(i, BlockMap))
            batch.events.extend(wire.event_to_wire(_own(i, one)) for i in items if isinstance(i, Event))
        self.stream.batch(batch)

    def lose_a_batch(self) -> None:
        self.sequence += 1

    def stop(self) -> None:
        """All its processes end in order."""
        self.sequence += 1
        batch = messages.Batch(sequence=self.sequence, closed_us=now_us())
        for one in self.ranks:
            last = one.items[-1]
            stopped = Event(one.process.process_id, last.sequence + 1, last.time_us, EventKind.STOPPED)
            batch.processes.append(wire.process_to_wire(one.process))
            batch.events.append(wire.event_to_wire(stopped))
        self.stream.batch(batch)


def _own(event: Event, rank: Rank) -> Event:
    device = rank.ref.device_uuid if event.device_uuid else None
    return replace(event, process_id=rank.process.process_id, device_uuid=device)


def recorded(name: str) -> tuple[Recording, list[Seen]]:
    recording = read_recording(Path(allocscope.cli.__path__[0]) / "recordings" / f"{name}.run.json")
    return recording, list(Player(recording, 20))


# what is watched


@dataclass
class Verdicts:
    """What one of the two says: each alert that fired, and when it was first seen."""

    first_s: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def look(self, alerts: list[tuple[str, str, str]]) -> None:
        for alert in alerts:
            self.first_s.setdefault(alert, time.monotonic())


def short(labels: dict[str, str]) -> tuple[str, str, str]:
    about = labels["node"] if labels["incident"] == "unwatched" else labels["job"]
    return labels.get("alertname", ""), labels["severity"], about


def of_collector(collector: CollectorProcess) -> list[tuple[str, str, str]]:
    items = collector.get("/api/v1/alerts", limit=500).json()["items"]
    return [short(alert["labels"]) for alert in items if alert["state"] != "pending"]


@dataclass
class Stage:
    receiver: Receiver
    alertmanagers: dict[str, AlertmanagerServer]
    collector: CollectorProcess
    prometheus: PrometheusServer
    said: dict[str, Verdicts] = field(default_factory=lambda: {"collector": Verdicts(), "prometheus": Verdicts()})

    def look(self) -> None:
        self.said["collector"].look(of_collector(self.collector))
        self.said["prometheus"].look([short(alert["labels"]) for alert in self.prometheus.alerts()])

    def all_is_said(self) -> bool:
        self.look()
        return all(verdicts.first_s.keys() == EXPECTED for verdicts in self.said.values())

    def posts(self, path: str, status: str, **labels: str) -> list[dict[str, Any]]:
        """Notifications of a group with these labels."""
        told: list[Any] = [post.content for post in list(self.receiver.posts) if post.path == path]
        return [one for one in told if one["status"] == status and labels.items() <= one["groupLabels"].items()]


@contextmanager
def staged(folder: Path, receiver: Receiver) -> Iterator[Stage]:
    with ExitStack() as ending:
        alertmanagers = {}
        for name in ("collector", "prometheus", "both"):
            place = folder / name
            place.mkdir()
            server = alertmanagers[name] = AlertmanagerServer(place, alertmanager_configuration(receiver, name))
            ending.callback(server.stop)
        for server in alertmanagers.values():
            until(server.ready, within_s=30)
        told = [flag for name in ("collector", "both") for flag in ("--alertmanager", alertmanagers[name].address)]
        told += ["--runbook-address", RUNBOOK]
        (folder / "c").mkdir()
        silent_node(folder / "c" / "collector.db")
        judging = ending.enter_context(collector(folder / "c", *told))
        place = folder / "p"
        place.mkdir()
        (place / RULES_FILE).write_text(rules())
        configuration = prometheus_configuration(judging, [alertmanagers["prometheus"], alertmanagers["both"]])
        prometheus = PrometheusServer(place, configuration)
        ending.callback(prometheus.stop)
        until(prometheus.ready, within_s=30)
        yield Stage(receiver, alertmanagers, judging, prometheus)


def silent_node(database: Path) -> None:
    """A node that was heard of most of a minute ago, by a collector that heard another until now: its own absence is no silence."""
    repository = open_repository(f"sqlite:///{database}")
    for node, daemon, ago_s in (("gone", "d", 45), ("n9", "d9", 0)):
        heard_us = now_us() - ago_s * 1_000_000
        repository.register_node(
            node, daemon, version="1", metrics_address=None, received_us=heard_us, silent_before_us=heard_us
        )
    repository.close()


@pytest.mark.timeout(240)
def test_a_collector_and_prometheus_say_the_same_and_of_one_incident_there_is_one_page(
    tmp_path: Path, receiver: Receiver
) -> None:
    growing, seen = recorded(GROWS)
    steady, calm = recorded(HEALTHY)
    with staged(tmp_path, receiver) as stage, ExitStack() as ending:
        daemon = DaemonMetrics()
        ending.callback(daemon.close)
        nodes = []
        for number in range(NODES):
            more = {"metrics_address": daemon.address} if number == 0 else {}
            connected = ending.enter_context(stream(stage.collector.grpc, f"n{number}", f"d{number}", **more))
            numbers = range(number * RANKS_A_NODE, (number + 1) * RANKS_A_NODE)
            ranks = [rank(growing, seen, n, "llama", ahead_s=AHEAD_S * (n == FIRST_TO_GO)) for n in numbers]
            nodes.append(Node(connected, ranks))
        well = Node(ending.enter_context(stream(stage.collector.grpc, "n9", "d9")), [rank(steady, calm, 99, "bert")])
        until(lambda: stage.prometheus.value('up{job="allocscope-daemon",node="n0"}'), within_s=60)

        died_us = next(i.time_us for i in seen if isinstance(i, Event)) - AHEAD_S * 1_000_000
        play(stage, [*nodes, well], growing.start_us, died_us, daemon)
        for node in nodes:
            node.stop()
        wait_until_all_is_said(stage)
        assert_same_time(stage)
        assert_same_alerts(stage)
        assert_one_page(stage)
        until(lambda: not any(map(critical, stage.alertmanagers.values())), within_s=90)
        assert_one_page(stage)


def wait_until_all_is_said(stage: Stage, within_s: float = 60.0) -> None:
    deadline_s, pause = time.monotonic() + within_s, threading.Event()
    while not stage.all_is_said() and time.monotonic() < deadline_s:
        pause.wait(0.1)
    said = {name: sorted(verdicts.first_s) for name, verdicts in stage.said.items()}
    assert said == {"collector": sorted(EXPECTED), "prometheus": sorted(EXPECTED)}


def play(stage: Stage, nodes: list[Node], start_us: int, until_us: int, daemon: DaemonMetrics) -> None:
    """Until the first rank dies. Data is lost halfway."""
    pause, began_s = threading.Event(), time.monotonic()
    halfway_us = (start_us + until_us) // 2
    moment_us = start_us
    while moment_us < until_us:
        played_s = QUIET_S + (time.monotonic() - began_s) * SPEED
        moment_us = min(start_us + round(played_s * 1e6), until_us)
        if moment_us > halfway_us and not daemon.lost:
            daemon.lost = 1
            nodes[0].lose_a_batch()
        for node in nodes:
            node.tell(moment_us)
        stage.look()
        pause.wait(0.1)


def assert_same_time(stage: Stage) -> None:
    collector, prometheus = stage.said["collector"].first_s, stage.said["prometheus"].first_s
    apart = {alert: prometheus[alert] - collector[alert] for alert in EXPECTED}
    assert {alert: s for alert, s in apart.items() if abs(s) > LATE_S} == {}


def assert_same_alerts(stage: Stage) -> None:
    """With the same labels, so that an Alertmanager that both tell has each of them once; and naming the same rank."""
    known = {name: server.alerts() for name, server in stage.alertmanagers.items()}
    identities = {name: sorted(map(_identity, alerts)) for name, alerts in known.items()}
    assert identities["both"] == sorted(set(identities["collector"]) | set(identities["prometheus"]))
    for name, alerts in known.items():
        [oom] = [alert for alert in alerts if alert["labels"]["alertname"] == "AllocscopeOOM"]
        assert oom["annotations"]["rank"] == str(FIRST_TO_GO), name
        assert oom["annotations"]["node"] == f"n{FIRST_TO_GO // RANKS_A_NODE}", name


def critical(alertmanager: AlertmanagerServer) -> list[Key]:
    return [_identity(alert) for alert in alertmanager.alerts() if alert["labels"]["severity"] == "critical"]


def _identity(alert: dict[str, Any]) -> Key:
    return tuple(sorted(alert["labels"].items()))


def assert_one_page(stage: Stage) -> None:
    """Of 64 ranks, three severities, thrashing and a death, whoever tells: one, naming the first to go and nobody else."""
    pages = {name: stage.posts(f"/{name}/pager", "firing") for name in stage.alertmanagers}
    assert {name: len(posts) for name, posts in pages.items()} == dict.fromkeys(stage.alertmanagers, 1)
    for name, [page] in pages.items():
        assert page["groupLabels"] == {"job": "llama", "incident": "memory"}
        [alert] = page["alerts"]
        assert short(alert["labels"]) == ("AllocscopeMemoryGrowth", "critical", "llama")
        assert alert["annotations"]["rank"] == str(FIRST_TO_GO), name
        assert alert["annotations"]["runbook_url"] == f"{RUNBOOK}/docs/runbook/AllocscopeMemoryGrowth.md"
        assert alert["annotations"]["summary"].startswith(f"rank {FIRST_TO_GO} of llama on n5 is about to run out")
    for name in stage.alertmanagers:
        chat = [alert for post in stage.posts(f"/{name}/chat", "firing", job="llama") for alert in post["alerts"]]
        lesser = {short(alert["labels"]) for alert in chat}
        assert lesser <= {("AllocscopeMemoryGrowth", "warning", "llama"), ("AllocscopeOOM", "warning", "llama")}
        assert stage.posts(f"/{name}/nobody", "firing") == [], "a warning says all that an info would"
    assert not [post for post in stage.receiver.posts if "bert" in str(post.content)]
