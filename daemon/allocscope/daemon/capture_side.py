"""What has to do with captures, wired together: from the folder beside the jobs' socket to the collector."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import structlog

from allocscope.daemon.capture_folder import CaptureFolder
from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_orders import CaptureOrders
from allocscope.daemon.capture_place import CapturePlace
from allocscope.daemon.capture_spool import CaptureSpool
from allocscope.daemon.capture_thread import CaptureThread
from allocscope.daemon.capture_uplink import CaptureUplink
from allocscope.daemon.captures import Captures
from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.config import DaemonSettings
from allocscope.daemon.devices import Devices
from allocscope.daemon.intake import Intake
from allocscope.daemon.keeper import Keeper
from allocscope.daemon.listen import find_group
from allocscope.daemon.node import Node
from allocscope.daemon.notes import Figures
from allocscope.daemon.observed import Observed
from allocscope.daemon.presence import Presence
from allocscope.model.captures import FOLDER

log = structlog.get_logger()

UNPACKED_FACTOR = 4
"""How much more than in the spool captures may have where jobs leave them: they shrink to a tenth, but all ranks of a job may run
out of memory at once."""


class CaptureSide:
    """The part of a daemon that takes, keeps and sends captures."""

    def __init__(
        self,
        settings: DaemonSettings,
        way: CollectorWay,
        node_name: str,
        socket: Path,
        spool_folder: Path,
        node: Node,
        intake: Intake,
        devices: Devices,
        observed: Observed,
    ) -> None:
        """SpoolError: its folder in the spool's, whose lock the caller holds, cannot be used."""
        self._settings, self._way, self._node_name = settings, way, node_name
        self._place_path, self._observed = socket.parent / FOLDER, observed
        self._losses, self._thread = CaptureLosses(observed), CaptureThread()
        self._figures = Figures(node, intake, observed, devices.total_bytes)
        self._presence = Presence(node, is_alive=devices.is_alive, owners=devices.owners)
        self.spool = CaptureSpool(spool_folder / FOLDER, settings.captures_limit_bytes, self._losses)
        self.orders = CaptureOrders(time.monotonic)
        self._place: CapturePlace | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; GroupError: there is no such group as the settings name."""
        uplink = self._new_uplink()
        captures = self._new_captures(uplink)
        self._tasks = [asyncio.create_task(captures.run()), asyncio.create_task(uplink.run())]

    async def end(self) -> None:
        """What is not kept, or not sent, is for the next start."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._thread.close()
        if self._place is not None:
            self._place.close()

    def _new_captures(self, uplink: CaptureUplink) -> Captures:
        settings, thread, spool = self._settings, self._thread, self.spool
        limit_bytes = UNPACKED_FACTOR * settings.captures_limit_bytes
        self._place = self._new_place()
        folder = CaptureFolder(self._place, self._losses, limit_bytes=limit_bytes)
        return Captures(
            folder,
            spool,
            thread,
            self.orders,
            self._figures,
            self._presence,
            Keeper(folder, spool, thread, self._losses, settings.capture_largest_bytes),
            self._observed,
            interval_s=settings.interval_s,
            on_kept=uplink.wake,
        )

    def _new_place(self) -> CapturePlace:
        group, mode = self._settings.socket_group, int(self._settings.socket_mode, 8)
        place = CapturePlace(self._place_path, group_id=find_group(group) if group else None, socket_mode=mode)
        try:
            with place.opened():  # before any job is told that a daemon is here
                pass
        except OSError as error:  # it is tried again with every look
            log.error("jobs can leave no captures", folder=os.fspath(place.path), why=error.strerror)
        return place

    def _new_uplink(self) -> CaptureUplink:
        return CaptureUplink(
            self._way,
            self._node_name,
            self.spool,
            self._thread,
            self._observed,
            self._losses,
            bytes_per_s=self._settings.capture_bytes_per_s,
        )
