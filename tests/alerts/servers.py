"""Real servers beside ours, on loopback, each ended by the test that started it."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests import needs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Server:
    """A process that answers HTTP, and says at /-/ready when it does."""

    def __init__(self, folder: Path, program: Path, port: int, *arguments: str) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [program, f"--web.listen-address=127.0.0.1:{port}", *arguments],
            cwd=folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._client = httpx.Client(base_url=self.address, timeout=10)

    def ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            return self._client.get("/-/ready").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(path, params=parameters)
        answer.raise_for_status()
        return answer.json()

    def stop(self) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.close()


class AlertmanagerServer(_Server):
    """An Alertmanager by itself."""

    def __init__(self, folder: Path, configuration: str) -> None:
        program = needs.alertmanager()
        (folder / "alertmanager.yml").write_text(configuration)
        super().__init__(
            folder,
            program,
            free_port(),
            "--config.file=alertmanager.yml",
            f"--storage.path={folder / 'data'}",
            "--cluster.listen-address=",
        )

    def alerts(self) -> list[dict[str, Any]]:
        """Those that it takes for firing, the inhibited ones too."""
        found: list[dict[str, Any]] = self.get("/api/v2/alerts")
        return found


class PrometheusServer(_Server):
    """A Prometheus; what its configuration names lies beside it in `folder`."""

    def __init__(self, folder: Path, configuration: str) -> None:
        program = needs.prometheus()
        (folder / "prometheus.yml").write_text(configuration)
        super().__init__(
            folder, program, free_port(), "--config.file=prometheus.yml", f"--storage.tsdb.path={folder / 'data'}"
        )

    def alerts(self) -> list[dict[str, Any]]:
        """Those that fire."""
        found: list[dict[str, Any]] = self.get("/api/v1/alerts")["data"]["alerts"]
        return [alert for alert in found if alert["state"] == "firing"]

    def value(self, expression: str) -> float | None:
        """Of its one element; None: it has none."""
        result = self.get("/api/v1/query", query=expression)["data"]["result"]
        return float(result[0]["value"][1]) if result else None
