"""A receiver of alerts on loopback that answers as it is told."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest


@dataclass(frozen=True)
class Post:
    """What came."""

    path: str
    headers: dict[str, str]
    content: object
    at_s: float


@dataclass(frozen=True)
class Answer:
    """What to say to one POST; `raw` instead of HTTP, after `release` where there is one. `endless`: a body that drips, and never ends."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes | None = None
    release: threading.Event | None = None
    endless: bool = False


class Receiver:
    """Answers each POST by the next of `answers`, then by 200, and remembers it."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.posts: list[Post] = []
        self._came = threading.Condition()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler(), bind_and_activate=False)
        self._server.server_bind()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        """Until now connections are refused."""
        self._server.server_activate()
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5)
        for answer in self.answers:
            if answer.release:
                answer.release.set()
        self._server.server_close()

    def wait(self, enough: Callable[[list[Post]], bool], within_s: float = 10.0) -> list[Post]:
        """What came, as soon as it is enough."""
        with self._came:
            assert self._came.wait_for(lambda: enough(self.posts), within_s), f"came: {self.posts}"
            return list(self.posts)

    def wait_for(self, count: int) -> list[Post]:
        return self.wait(lambda posts: len(posts) >= count)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with receiver._came:
                    receiver.posts.append(Post(self.path, dict(self.headers), content, time.monotonic()))
                    answer = receiver.answers.pop(0) if receiver.answers else Answer()
                    receiver._came.notify_all()
                if answer.release:
                    answer.release.wait(10)
                try:
                    self._answer(answer)
                except OSError:
                    self.close_connection = True  # the teller did not wait

            def _answer(self, answer: Answer) -> None:
                if answer.raw is not None:
                    self.connection.sendall(answer.raw)
                    self.connection.shutdown(socket.SHUT_WR)
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(1 << 30 if answer.endless else len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)
                while answer.endless:  # until the teller hangs up
                    self.wfile.write(b".")
                    threading.Event().wait(0.01)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as it is called there)
                pass

        return Handler


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """One that answers."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    receiver = Receiver()
    receiver.start()
    yield receiver
    receiver.stop()


@pytest.fixture
def deaf_receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """One that refuses connections until it is started."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    receiver = Receiver()
    yield receiver
    receiver.stop()
