"""A conversation with the collector ends when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest

from allocscope.daemon.lane import converse
from allocscope.proto.v1.collector_service_pb2 import IngestResponse


@pytest.mark.parametrize("fails", [True, False], ids=["the call fails", "the call ends"])
async def test_a_conversation_that_is_cancelled_ends_though_grpc_swallows_it(fails):
    """grpc.aio waits for a task of its own that ends in order when it is cancelled (grpc/aio/_call.py, _prepare_rpc); else a daemon
    that ends, or whose other stream has broken, would wait for ever.
    """
    is_waiting = asyncio.Event()

    async def prepare() -> None:
        is_waiting.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def call() -> AsyncIterator[IngestResponse]:
        await asyncio.create_task(prepare())
        if fails:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing)
        for response in list[IngestResponse]():
            yield response

    async def receive(_: IngestResponse) -> None:
        raise AssertionError("nothing comes")

    talking = asyncio.create_task(converse(call(), receive))
    await is_waiting.wait()
    talking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talking
