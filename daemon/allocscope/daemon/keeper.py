"""Captures into the spool, piece by piece; nothing else on the captures' thread waits for longer than a piece."""

from __future__ import annotations

from allocscope.daemon.capture_folder import CaptureFolder
from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_spool import CaptureSpool
from allocscope.daemon.capture_thread import CaptureThread
from allocscope.daemon.packing import Packing, SnapshotUnusable
from allocscope.proto.v1.capture_service_pb2 import CaptureHello


class Keeper:
    """Keeps a capture with its snapshot, or at least without."""

    def __init__(
        self,
        folder: CaptureFolder,
        spool: CaptureSpool,
        thread: CaptureThread,
        losses: CaptureLosses,
        largest_bytes: int,
    ) -> None:
        """`largest_bytes` of a snapshot as its process wrote it."""
        self._folder, self._spool, self._thread, self._losses = folder, spool, thread, losses
        self._largest_bytes = largest_bytes

    async def keep_with_snapshot(self, hello: CaptureHello, uid: int) -> None:
        """With the snapshot of that owner; where it cannot be taken, without, and the capture says why. OSError: no disk has room."""
        try:
            snapshot = await self._thread.do(
                self._folder.open_snapshot, hello.capture.capture_id, uid, self._largest_bytes
            )
            await self._finish(
                await self._thread.do(Packing, self._spool, hello, snapshot, largest_bytes=self._largest_bytes)
            )
        except SnapshotUnusable as unusable:
            self._losses.add(unusable.reason, hello.capture.capture_id, unusable.why)
            await self.keep_without_snapshot(hello, unusable.why)

    async def keep_without_snapshot(self, hello: CaptureHello, problem: str) -> None:
        """With the problem, unless the process itself told one. OSError: no disk has room."""
        if not hello.capture.HasField("problem"):
            hello.capture.problem = problem
        await self._finish(await self._thread.do(Packing, self._spool, hello, None))

    async def _finish(self, packing: Packing) -> None:
        try:
            while await self._thread.do(packing.step):
                pass
            await self._thread.do(packing.finish)
        except BaseException:
            await self._thread.do(packing.abandon)
            raise
