"""The server of /metrics: whoever asks gets an answer, whatever others do; and it is bounded."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import pytest
from prometheus_client import CollectorRegistry

from allocscope.daemon import metrics_server
from allocscope.daemon.errors import ListenError
from allocscope.daemon.metrics_server import MetricsServer

WAIT_S = 20


class Waiting:
    """An application that answers once it is let."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    def __call__(self, _: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        self.asked.release()
        self.may_answer.wait(WAIT_S)
        start_response("200 OK", [])
        return [b"here"]


@contextmanager
def serving(application: WSGIApplication | None = None) -> Iterator[str]:
    server = MetricsServer("127.0.0.1:0", CollectorRegistry(), lambda metrics: application or metrics)
    server.start()
    try:
        yield server.address
    finally:
        server.close()


def get(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as response:
        status: int = response.status
    return status


def connect(address: str, says: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    connection.sendall(says)
    return connection


def test_who_never_says_what_he_wants_gives_his_place_away():
    with serving() as address, ExitStack() as stack:
        silent = [stack.enter_context(connect(address, b"GET /metrics HTTP/1.1\r\n")) for _ in range(8)]
        assert [get(address) for _ in range(3)] == [200, 200, 200]
        assert silent[0].recv(1) == b""


def test_who_is_being_answered_keeps_his_place_and_more_are_turned_away():
    application = Waiting()
    with serving(application) as address, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(get, address) for _ in range(8)]
        for _ in answers:
            assert application.asked.acquire(timeout=WAIT_S)
        with pytest.raises(OSError, match=r"."):
            get(address)
        application.may_answer.set()
        assert [answer.result() for answer in answers] == [200] * 8


def test_who_takes_too_long_over_his_answer_gives_his_place_away(monkeypatch):
    monkeypatch.setattr(metrics_server, "SCRAPE_TIMEOUT_S", -1)
    application = Waiting()
    with serving(application) as address, ExitStack() as stack:
        slow = [stack.enter_context(connect(address, b"GET / HTTP/1.1\r\n\r\n")) for _ in range(8)]
        for _ in slow:
            assert application.asked.acquire(timeout=WAIT_S)
        application.may_answer.set()
        assert get(address) == 200


def test_it_listens_on_ipv6_where_there_is_any():
    try:
        server = MetricsServer("[::1]:0", CollectorRegistry())
    except ListenError as error:
        assert str(error).startswith("cannot serve /metrics on [::1]:0: ")  # noqa: PT017 (there is no IPv6 here)
        return
    server.start()
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WAIT_S) as response:
        assert response.status == 200
    server.close()


def test_others_are_told_the_hosts_name_where_it_listens_everywhere():
    for listen, expected in (("0.0.0.0:0", "gpu7"), ("127.0.0.1:0", "127.0.0.1")):
        server = MetricsServer(listen, CollectorRegistry())
        assert server.reachable_address("gpu7") == f"{expected}:{server.address.rpartition(':')[2]}"
        server.close()
