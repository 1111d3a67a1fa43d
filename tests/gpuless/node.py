"""A real collector, and a real daemon that sees the rig's devices by NVML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Machine, Service, until
from tests.gpuless.rig import Rig

LINE = re.compile(r"^allocscope_bill_bytes\{(?P<labels>[^}]*)\} (?P<bytes>\S+)$", re.MULTILINE)


class Node:
    """One node of a fleet of one."""

    def __init__(self, machine: Machine, collector: Service, daemon: Service) -> None:
        self.machine, self.collector, self.daemon = machine, collector, daemon

    @property
    def socket(self) -> Path:
        return Path(str(self.daemon.addresses["socket"]))

    def get(self, path: str) -> Any:
        """What the collector answers."""
        return self.collector.get(path)

    def bill(self, uuid: str) -> dict[tuple[str, str], int]:
        """The lines of a device, by job and line."""
        lines = {}
        for line in LINE.finditer(self.daemon.get("/metrics")):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line["labels"]))
            if labels["uuid"] == uuid:
                lines[labels["job"], labels["line"]] = int(float(line["bytes"]))
        return lines

    def bill_with(self, uuid: str, expected: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
        """The whole bill, once these lines of it are so."""
        until(lambda: self.bill(uuid).items() >= expected.items(), f"the bill has {expected}: {self.bill(uuid)}")
        return self.bill(uuid)


@contextmanager
def node(rig: Rig, folder: Path, *options: str, collector_options: Sequence[str] = ()) -> Iterator[Node]:
    """Both processes, ended with the block; `options` are the daemon's."""
    machine = Machine(folder)
    try:
        collector = machine.collector(*collector_options)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in rig.nvml_settings.items():
                patch.setenv(name, value)
            daemon = machine.daemon("n1", collector, "--nvml", "true", "--nvml-interval-s", "0.2", *options)
        yield Node(machine, collector, daemon)
    except BaseException:
        machine.show_logs()
        raise
    finally:
        machine.close()
