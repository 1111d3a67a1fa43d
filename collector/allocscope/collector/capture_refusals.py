"""Questions about captures that have no such answer.

CaptureRefusal
├── UnknownCapture    there is none of that id
├── NotReady          it is still to come
├── NoSnapshot        it failed
├── SnapshotDropped   its snapshot was here
├── JobEnded          no process of the job is there to be captured
├── UnknownRank       no process that lives is of that rank, or id
└── UnknownDevice     the process does not use such a device
"""

from __future__ import annotations

from allocscope.storage.captures import CaptureRecord, CaptureState


class CaptureRefusal(LookupError):  # noqa: N818  (an answer, not a failure)
    """A question about captures that has no such answer; the text says why, and what to do."""

    code = "no_capture"

    def __init__(self, text: str, **details: object) -> None:
        super().__init__(text)
        self.details = details


class UnknownCapture(CaptureRefusal):
    """There is none of that id."""

    code = "unknown_capture"


class NotReady(CaptureRefusal):
    """It is still to come."""

    code = "capture_not_ready"


class NoSnapshot(CaptureRefusal):
    """It failed."""

    code = "no_snapshot"


class SnapshotDropped(CaptureRefusal):
    """It was here."""

    code = "snapshot_dropped"


class JobEnded(CaptureRefusal):
    """No process of it is there to be captured."""

    code = "job_ended"


class UnknownRank(CaptureRefusal):
    """No process that lives is of that rank, or id."""

    code = "unknown_rank"


class UnknownDevice(CaptureRefusal):
    """The process does not use such a device."""

    code = "unknown_device"


def why_not(record: CaptureRecord) -> CaptureRefusal:
    """Why there is no snapshot to be read."""
    about = {"capture_id": record.capture_id, "state": record.state.value}
    if record.state is CaptureState.FAILED:
        return NoSnapshot(f"there is no snapshot: {record.problem or 'its node did not say why'}", **about)
    if record.state is CaptureState.DROPPED:
        return SnapshotDropped(f"{record.problem}; order another one while the job runs", **about)
    return NotReady("it is on order, and has not come yet; ask again in a moment", **about)
