"""The edge toward jobs: who says nothing keeps nobody out."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator

import pytest

from allocscope.daemon import service as service_module
from allocscope.daemon.call import CallRefused
from allocscope.daemon.capture_orders import CaptureOrders
from allocscope.daemon.intake import Intake
from allocscope.daemon.node import Node
from allocscope.daemon.observed import Observed
from allocscope.daemon.peers import Peer
from allocscope.daemon.service import ProbeService
from allocscope.model.wire import process_to_wire
from allocscope.proto.v1.probe_service_pb2 import AttachRequest
from tests.daemon.fakes import WAIT_S, process


async def listen(service: ProbeService, *requests: AttachRequest) -> None:
    """A stream that sends these, and then nothing more."""

    async def sent() -> AsyncIterator[AttachRequest]:
        for request in requests:
            yield request
        await asyncio.Event().wait()

    async for _ in service.attach(sent(), Peer(0, 0)):
        pass


def test_a_stream_of_nobodys_is_ended_and_a_job_that_has_nothing_to_say_is_not(monkeypatch):
    monkeypatch.setattr(service_module, "HELLO_WITHIN_S", 0.01)

    async def story() -> bool:
        service = ProbeService(Node(), Intake(lambda: None), Observed(), CaptureOrders(time.monotonic), lambda _: None)
        job = asyncio.create_task(listen(service, AttachRequest(hello=process_to_wire(process()))))
        nobody = asyncio.create_task(listen(service))
        with pytest.raises(CallRefused, match=r"no hello that could be taken within 0\.01 s"):
            await asyncio.wait_for(nobody, WAIT_S)
        goes_on = not job.done()
        job.cancel()
        await asyncio.wait([job])
        return goes_on

    assert asyncio.run(story())


async def test_of_a_message_nothing_is_kept_while_the_next_one_is_waited_for():
    """Of each of a thousand streams it could be much."""
    service = ProbeService(Node(), Intake(lambda: None), Observed(), CaptureOrders(time.monotonic), lambda _: None)
    request, counts = AttachRequest(hello=process_to_wire(process())), list[int]()
    is_waiting = asyncio.Event()

    async def sent() -> AsyncIterator[AttachRequest]:
        counts.append(sys.getrefcount(request))
        yield request
        counts.append(sys.getrefcount(request))
        is_waiting.set()
        await asyncio.Event().wait()

    async def listens() -> None:
        async for _ in service.attach(sent(), Peer(0, 0)):
            pass

    job = asyncio.create_task(listens())
    await asyncio.wait_for(is_waiting.wait(), WAIT_S)
    assert counts[1] == counts[0]
    job.cancel()
    await asyncio.wait([job])
