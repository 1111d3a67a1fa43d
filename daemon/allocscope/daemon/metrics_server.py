"""The HTTP server of /metrics: in threads of its own, a few at a time, and no one of those who ask keeps the others out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from allocscope.daemon.errors import ListenError

MOST_SCRAPES = 8
"""At a time; who comes later takes the place of one that has not said what it wants, or is too slow, or is turned away."""
SCRAPE_TIMEOUT_S = 10.0


class MetricsServer:
    """An HTTP server in threads of its own, a few at a time."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        also: Callable[[WSGIApplication], WSGIApplication] = lambda metrics: metrics,
    ) -> None:
        """Takes the address; it answers once it is started. `also`: puts another application before that of the metrics."""
        self._host, _, port = address.rpartition(":")
        try:
            self._server = _new_server(self._host.strip("[]"), int(port))
        except OSError as error:
            raise ListenError(address, error.strerror or str(error)) from error
        self._server.set_app(also(make_wsgi_app(registry)))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def address(self) -> str:
        """HOST:PORT as bound."""
        return f"{self._host}:{self._server.server_port}"

    def reachable_address(self, host_name: str) -> str:
        """HOST:PORT for others: with the host's name where it listens on every interface."""
        everywhere = self._host in ("0.0.0.0", "[::]")
        return f"{host_name}:{self._server.server_port}" if everywhere else self.address

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(WSGIServer):
    """One thread a scrape, a few at a time."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._changing = threading.Lock()
        self._began_s: dict[Any, float] = {}
        """By connection, since when it is here, by the monotonic clock; the oldest first."""
        self._asked: set[Any] = set()
        """Of them, those whose whole request was read."""
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Without WSGIServer's look-up of the host's full name, which may wait for a DNS server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for TIME_WAIT
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if there is room."""
        if not self._enter(request):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 (a client that went away in the middle)
            pass
        finally:
            self._leave(request)
            with suppress(OSError):
                self.shutdown_request(request)

    def has_asked(self, request: Any) -> None:
        """The whole of a request was read."""
        with self._changing:
            self._asked.add(request)

    def _enter(self, request: Any) -> bool:
        """Whether there is room, or was made: a client may drip its request, or read its answer, a byte at a time."""
        now_s = time.monotonic()
        with self._changing:
            if len(self._began_s) >= MOST_SCRAPES:
                slow = (it for it, began_s in self._began_s.items() if now_s - began_s > SCRAPE_TIMEOUT_S)
                silent = (it for it in self._began_s if it not in self._asked)
                given_up = next(slow, None) or next(silent, None)
                if given_up is None:
                    return False
                self._forget(given_up)
                with suppress(OSError):
                    given_up.shutdown(socket.SHUT_RDWR)  # its thread ends by that
            self._began_s[request] = now_s
            return True

    def _leave(self, request: Any) -> None:
        with self._changing:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        self._began_s.pop(request, None)
        self._asked.discard(request)


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S

    def get_environ(self) -> WSGIEnvironment:
        """Called once a request was read."""
        cast("_Server", self.server).has_asked(self.request)
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        """Scrapes are not logged."""


def _new_server(host: str, port: int) -> _Server:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    class Server(_Server):
        address_family = family

    return Server((host, port), _Handler)
