"""The edge toward jobs: who says nothing keeps nobody out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn, cast

import grpc
import pytest

from allocscope.daemon import service as service_module
from allocscope.daemon.intake import Intake
from allocscope.daemon.node import Node
from allocscope.daemon.observed import Observed
from allocscope.daemon.service import ProbeService
from allocscope.model.wire import process_to_wire
from allocscope.proto.v1.probe_service_pb2 import AttachRequest
from tests.daemon.fakes import WAIT_S, process


class Aborted(Exception):  # noqa: N818  (as gRPC ends a call)
    """A call was aborted."""


class Context:
    """As much of gRPC's as a stream uses."""

    async def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        raise Aborted(text)


async def listen(service: ProbeService, *requests: AttachRequest) -> None:
    """A stream that sends these, and then nothing more."""

    async def sent() -> AsyncIterator[AttachRequest]:
        for request in requests:
            yield request
        await asyncio.Event().wait()

    async for _ in service.Attach(sent(), cast("grpc.aio.ServicerContext[Any, Any]", Context())):
        pass


def test_a_stream_of_nobodys_is_ended_and_a_job_that_has_nothing_to_say_is_not(monkeypatch):
    monkeypatch.setattr(service_module, "HELLO_WITHIN_S", 0.01)

    async def story() -> bool:
        service = ProbeService(Node(), Intake(lambda: None), Observed(), lambda _: None)
        job = asyncio.create_task(listen(service, AttachRequest(hello=process_to_wire(process()))))
        nobody = asyncio.create_task(listen(service))
        with pytest.raises(Aborted, match=r"no hello that could be taken within 0\.01 s"):
            await asyncio.wait_for(nobody, WAIT_S)
        goes_on = not job.done()
        job.cancel()
        await asyncio.wait([job])
        return goes_on

    assert asyncio.run(story())
