"""What goes to the daemon, as messages in bytes: all of the probe that needs protobuf, which is imported when there is a daemon."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from allocscope.model.identity import Process
from allocscope.model.sample import chunks
from allocscope.probe import fork
from allocscope.probe.ring import Item


class Wire(NamedTuple):
    """What needs protobuf."""

    words: Any
    """`allocscope.model.wire`."""
    request: Any
    response: Any
    method: str


@cache
def import_wire() -> Wire:
    """Protobuf's part, once it is needed. It raises whatever an old or broken protobuf makes of it."""
    with fork.held_off():
        from allocscope.model import wire
        from allocscope.proto.v1 import probe_service_pb2
    service = probe_service_pb2.DESCRIPTOR.services_by_name["ProbeService"]
    return Wire(wire, probe_service_pb2.AttachRequest, probe_service_pb2.AttachResponse, f"/{service.full_name}/Attach")


def greeting(process: Process, sent_us: int) -> bytes:
    """The hello."""
    wire = import_wire()
    return bytes(wire.request(sent_us=sent_us, hello=wire.words.process_to_wire(process)).SerializeToString())


def stamped(packed: bytes, sent_us: int) -> bytes:
    """A request that was packed before, with the time that it is sent. (Messages in bytes merge by being joined.)"""
    return packed + bytes(import_wire().request(sent_us=sent_us).SerializeToString())


def of_samples(items: list[Item], sent_us: int) -> list[bytes]:
    """Samples of one allocator; as many messages as there are sets of known figures among them."""
    wire = import_wire()
    ref = items[0].payload[0]
    return [
        wire.request(sent_us=sent_us, samples=wire.words.chunk_to_wire(chunk)).SerializeToString()
        for chunk in chunks(ref, (item.payload[1] for item in items))
    ]
