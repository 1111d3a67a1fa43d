"""A real Alertmanager, told by us, tells somebody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allocscope.alerts.notify import Notifier
from allocscope.alerts.notify_alertmanager import Alertmanager
from tests.alerts.conftest import Post, Receiver
from tests.alerts.servers import AlertmanagerServer
from tests.alerts.stories import CRITICAL, WARNING, alert, until

ROUTES = """
route: {{receiver: us, group_by: [job], group_wait: 100ms, group_interval: 200ms, repeat_interval: 1h}}
receivers: [{{name: us, webhook_configs: [{{url: "{address}/told", send_resolved: true}}]}}]
"""


class Server(AlertmanagerServer):
    """An Alertmanager that tells a receiver."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        super().__init__(folder, ROUTES.format(address=receiver.address))


@pytest.fixture
def server(tmp_path: Path, receiver: Receiver) -> Iterator[Server]:
    server = Server(tmp_path, receiver)
    try:
        until(server.ready, within_s=20)
        yield server
    finally:
        server.stop()


def _told(posts: list[Post]) -> list[tuple[str, str]]:
    """(rank, state) of every alert in every group that came."""
    contents: list[dict[str, Any]] = [json.loads(json.dumps(post.content)) for post in posts]
    return [(a["labels"]["rank"], a["status"]) for content in contents for a in content["alerts"]]


def test_what_fires_arrives_whole_is_told_once_though_refreshed_and_resolves(server: Server, receiver: Receiver):
    notifier = Notifier(Alertmanager(server.address, page_address="http://127.0.0.1:9464/", refresh_s=1.0))
    notifier.start()
    try:
        notifier.publish([alert(CRITICAL)])
        receiver.wait(lambda posts: ("3", "firing") in _told(posts))
        (standing,) = until(server.alerts)
        assert standing["labels"] == {
            "alertname": "AllocscopeFragmentationOOMRisk",
            "severity": "critical",
            "cause": "fragmentation",
            "incident": "memory",
            "node": "n7",
            "job": "llama",
            "rank": "3",
            "gpu": "2",
            "uuid": "GPU-3f",
        }
        assert standing["annotations"]["summary"].startswith(
            "rank 3 of llama on n7, GPU 2 is about to run out of memory"
        )
        assert standing["annotations"]["runbook_url"] == "docs/runbook/AllocscopeFragmentationOOMRisk.md"
        assert standing["generatorURL"] == "http://127.0.0.1:9464/"

        refreshed = until(lambda: [a for a in server.alerts() if a["updatedAt"] > standing["updatedAt"]])
        assert [a["startsAt"] for a in refreshed] == [standing["startsAt"]]

        notifier.publish([alert(CRITICAL, resolved=True, keep_firing_for_s=0)])
        posts = receiver.wait(lambda posts: ("3", "resolved") in _told(posts))
        assert _told(posts) == [("3", "firing"), ("3", "resolved")]
        assert until(lambda: server.alerts() == [])
    finally:
        notifier.close(5)


def test_ranks_of_one_job_are_one_group(server: Server, receiver: Receiver):
    notifier = Notifier(Alertmanager(server.address))
    notifier.start()
    try:
        notifier.publish([alert(CRITICAL, rank=rank) for rank in range(8)])
        posts = receiver.wait(lambda posts: len(_told(posts)) >= 8)
    finally:
        notifier.close(5)
    assert len(posts) == 1
    assert sorted(_told(posts)) == [(str(rank), "firing") for rank in range(8)]


def test_what_fires_ends_by_itself_where_its_teller_has_died(server: Server, receiver: Receiver):
    notifier = Notifier(Alertmanager(server.address, refresh_s=0.5))
    notifier.start()
    notifier.publish([alert(WARNING)])
    receiver.wait(lambda posts: ("3", "firing") in _told(posts))
    notifier.close(5)
    receiver.wait(lambda posts: ("3", "resolved") in _told(posts))


def test_one_that_comes_back_is_told_anew(server: Server, receiver: Receiver):
    notifier = Notifier(Alertmanager(server.address))
    notifier.start()
    try:
        for times in range(2):
            notifier.publish([alert()])
            receiver.wait_for(2 * times + 1)
            notifier.publish([alert(resolved=True, keep_firing_for_s=0)])
            receiver.wait_for(2 * times + 2)
    finally:
        notifier.close(5)
    assert _told(receiver.posts) == [("3", "firing"), ("3", "resolved")] * 2


def test_one_that_was_not_there_gets_what_stands_once_it_is(tmp_path: Path, receiver: Receiver):
    server = Server(tmp_path, receiver)
    notifier = Notifier(Alertmanager(server.address), first_wait_s=0.05, longest_wait_s=0.1)
    notifier.start()
    try:
        notifier.publish([alert()])
        until(server.ready, within_s=20)
        assert [a["labels"]["rank"] for a in until(server.alerts)] == ["3"]
    finally:
        notifier.close(5)
        server.stop()
