"""What the API says of captures, as JSON. Values in, values out."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from allocscope.collector.views import Json
from allocscope.storage.captures import CaptureRecord, CaptureState

LONGEST_JOB = 80
"""Characters of a job's name that a file is called by."""


def capture(record: CaptureRecord, gpu: int | None) -> Json:
    """One capture, from its order on. `gpu`: its device's index on its node."""
    return {
        "capture_id": record.capture_id,
        "job_id": record.job,
        "job": record.job,
        "rank": record.rank,
        "process_id": record.process_id,
        "node": record.node,
        "gpu": gpu,
        "uuid": record.device_uuid,
        "reason": record.reason.value,
        "state": record.state.value,
        "ordered_us": record.ordered_us,
        "sent_us": record.sent_us,
        "time_us": record.time_us,
        "received_us": record.received_us,
        "history_s": None if record.history_us is None else record.history_us / 1e6,
        "most_history_entries": record.most_history_entries,
        "history_entries": record.history_entries,
        "tensors": record.tensors,
        "snapshot_bytes": record.snapshot_bytes,
        "stored_bytes": record.stored_bytes,
        "file_name": file_name(record) if record.state is CaptureState.KEPT else None,
        "problem": record.problem,
    }


def file_name(record: CaptureRecord) -> str:
    """What a download is called, on any system: the job, the rank, and when it was taken."""
    job = re.sub(r"[^A-Za-z0-9._+-]+", "_", record.job)[:LONGEST_JOB].strip("._-") or "job"
    rank = "" if record.rank is None else f"-rank{record.rank}"
    return f"{job}{rank}-{_moment(record.time_us or record.received_us or 0)}.pickle"


def _moment(time_us: int) -> str:
    try:
        return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y%m%dT%H%M%SZ}"
    except (OverflowError, ValueError, OSError):  # somebody's clock
        return f"{time_us}us"
