"""What a daemon first says of a capture, checked; and how one is refused, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc

from allocscope.collector.decode import LONGEST_NAME, decode_process
from allocscope.collector.whole_gzip import NotWhole, TooLarge
from allocscope.model import Capture, Process
from allocscope.model.wire import WireError, capture_from_wire
from allocscope.proto.v1.capture_service_pb2 import CaptureHello, KeepRequest
from allocscope.storage.captures import CaptureArrival, CaptureRecord, CaptureState
from allocscope.storage.repository import Repository

LONGEST_PROBLEM = 2000
"""Characters; what is longer is cut, since it is for people."""
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


class Refused(Exception):  # noqa: N818  (a status, not a failure)
    """How a call ends that brings nothing that can be kept."""

    def __init__(self, code: grpc.StatusCode, text: str, reason: str | None) -> None:
        """`reason`: why the capture was taken; None: that was not said."""
        super().__init__(text)
        self.code, self.text, self.reason = code, text, reason or "unknown"

    @property
    def for_good(self) -> bool:
        """Whether sending it again will not help."""
        return self.code in (INVALID, EXHAUSTED)


@dataclass(frozen=True, slots=True)
class Claim:
    """A capture that a daemon wants to be kept."""

    capture: Capture
    process: Process
    node: str
    is_kept: bool
    """It came before, and need not come again."""

    def arrival(self, received_us: int) -> CaptureArrival:
        """Without its snapshot."""
        return CaptureArrival(self.capture, self.process, self.node, received_us)

    def refused(self, code: grpc.StatusCode, text: str) -> Refused:
        """In words that name it."""
        return Refused(code, f"capture {self.capture.capture_id}: {text}", self.capture.reason.value)

    def damaged(self, text: str) -> Refused:
        """It cannot be kept as it is."""
        return self.refused(INVALID, f"{text}; take another")

    def too_large(self, text: str) -> Refused:
        """It will never be kept."""
        return self.refused(EXHAUSTED, f"{text}; raise that, or order one with less history")

    @contextmanager
    def judging(self) -> Iterator[None]:
        """What is wrong with its gzip, in these words."""
        try:
            yield
        except TooLarge as error:
            raise self.too_large(f"{error} (the collector's capture_largest_bytes)") from error
        except NotWhole as error:
            raise self.damaged(str(error)) from error

    def piece_of(self, request: KeepRequest) -> bytes:
        """What a later request brings."""
        if request.WhichOneof("message") != "piece":
            raise self.damaged("a second hello in one call")
        return request.piece


def claim_of(first: KeepRequest | None, repository: Repository) -> Claim:
    """From the first request. Refused, StorageError."""
    if first is None or first.WhichOneof("message") != "hello":
        raise Refused(INVALID, "the first request of a call must be the hello", None)
    hello = first.hello
    if not 0 < len(hello.node) <= LONGEST_NAME:
        text = f"hello.node has {len(hello.node)} characters; it must have 1 to {LONGEST_NAME}"
        raise Refused(INVALID, text, None)
    try:
        capture = _capture(hello)
        known = repository.captures.find(capture.capture_id)
        process = _process(hello, capture, repository)
        _check_owner(capture, process, known)
    except WireError as error:
        raise Refused(INVALID, str(error), None) from error
    is_kept = known is not None and known.state in (CaptureState.KEPT, CaptureState.DROPPED)
    return Claim(capture, process, hello.node, is_kept)


def _capture(hello: CaptureHello) -> Capture:
    capture = capture_from_wire(hello.capture)
    longest = max(capture.process_id, capture.device_uuid or "", key=len)
    if len(longest) > LONGEST_NAME:
        raise WireError("name_too_long", f"a name of {len(longest)} characters (at most {LONGEST_NAME})")
    return replace(capture, problem=capture.problem and capture.problem[:LONGEST_PROBLEM])


def _process(hello: CaptureHello, capture: Capture, repository: Repository) -> Process:
    """As it is described there; a daemon that answers for a process that has gone cannot, and need not, describe it."""
    if hello.process.job or capture.snapshot_bytes is not None:
        return decode_process(hello.process)
    known = repository.process(capture.process_id)
    if known is None:
        raise WireError("unknown_process", f"process {capture.process_id[:40]!r} is not described, and was not before")
    return known.process


def _check_owner(capture: Capture, process: Process, known: CaptureRecord | None) -> None:
    if capture.process_id != process.process_id:
        raise WireError(
            "foreign_process",
            f"capture {capture.capture_id} is of process {capture.process_id}, and {process.process_id} is described",
        )
    if known is not None and known.process_id != process.process_id:
        raise WireError(
            "foreign_process",
            f"capture {capture.capture_id} is of process {known.process_id}, not {process.process_id}",
        )
