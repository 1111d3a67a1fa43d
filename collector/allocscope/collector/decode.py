"""From a batch as a daemon claims it to what can be stored, and what cannot, with reasons. One bad thing costs itself only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from allocscope.model import AllocatorRef, BlockMap, Event, Process, SampleChunk, wire
from allocscope.model.wire import LARGEST_STORED, WireError
from allocscope.proto.v1 import block_map_pb2, collector_service_pb2, event_pb2, identity_pb2, sample_pb2
from allocscope.storage.records import Dropped, NodeBatch

_Claim = TypeVar("_Claim")
_Value = TypeVar("_Value")

LONGEST_NAME = 512
"""Characters of a job's name, a UUID, an id: they become keys, labels and headings."""
LONGEST_WORD, MOST_DROPPED = 64, 64
"""Of what a batch says that its node lost."""
LONGEST_TEXT = 500
"""Characters of a refusal's text: what is refused may be of any length."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something of a batch is not stored."""

    reason: str
    """A fixed word, for counting."""
    text: str
    """For people."""
    count: int
    """How many samples, maps, events or others."""


def decode(
    claimed: collector_service_pb2.Batch, *, node: str, daemon_id: str, received_us: int, late: bool = False
) -> tuple[NodeBatch, tuple[Refusal, ...]]:
    """What can be stored of a batch, and what is refused of it."""
    decoder = _Decoder()
    processes = decoder.each(claimed.processes, decode_process)
    described = {process.process_id for process in processes}

    def chunk(claim: sample_pb2.SampleChunk) -> SampleChunk:
        _known(claim.allocator.process_id, described)
        return wire.chunk_from_wire(claim)

    def block_map(claim: block_map_pb2.BlockMap) -> tuple[AllocatorRef, BlockMap]:
        _known(claim.allocator.process_id, described)
        return wire.block_map_from_wire(claim)

    def event(claim: event_pb2.Event) -> Event:
        _known(claim.process_id, described)
        return wire.event_from_wire(claim)

    batch = NodeBatch(
        node=node,
        daemon_id=daemon_id,
        sequence=claimed.sequence,
        closed_us=min(claimed.closed_us, LARGEST_STORED),
        received_us=received_us,
        processes=processes,
        chunks=decoder.each(claimed.samples, chunk, lambda claim: len(claim.sequence)),
        block_maps=decoder.each(claimed.block_maps, block_map),
        events=decoder.each(claimed.events, event),
        readings=decoder.each(claimed.devices, wire.reading_from_wire),
        unused_before=claimed.unused_before,
        dropped=tuple(
            Dropped(one.what[:LONGEST_WORD], one.reason[:LONGEST_WORD], one.count)
            for one in claimed.dropped[:MOST_DROPPED]
        ),
        late=late,
    )
    return batch, tuple(decoder.refused)


class _Decoder:
    """Takes what can be read, and notes what cannot."""

    def __init__(self) -> None:
        self.refused: list[Refusal] = []

    def each(
        self,
        claims: Iterable[_Claim],
        read: Callable[[_Claim], _Value],
        size: Callable[[_Claim], int] = lambda _: 1,
    ) -> tuple[_Value, ...]:
        values = []
        for claim in claims:
            try:
                values.append(read(claim))
            except WireError as error:
                self.refused.append(Refusal(error.reason, str(error)[:LONGEST_TEXT], size(claim)))
        return tuple(values)


def decode_process(claim: identity_pb2.Process) -> Process:
    """A process as its node describes it; WireError says what cannot be."""
    return _process_of(claim.SerializeToString())


@lru_cache(maxsize=4096)
def _process_of(serialized: bytes) -> Process:
    """Each batch describes its processes anew, most often in the very same words."""
    process = wire.process_from_wire(identity_pb2.Process.FromString(serialized))
    names = [process.process_id, process.job, process.host, *(device.uuid for device in process.devices)]
    longest = max(names, key=len)
    if len(longest) > LONGEST_NAME:
        raise WireError(
            "name_too_long", f"a name of {len(longest)} characters (at most {LONGEST_NAME}): {longest[:40]!r}…"
        )
    return process


def _known(process_id: str, described: set[str]) -> None:
    if process_id not in described:
        raise WireError(
            "unknown_process",
            f"process {process_id[:40]!r} is not described in its batch, or its description was refused",
        )
