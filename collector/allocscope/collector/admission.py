"""Which daemons may speak, and for which node: by the certificate that they showed, or the token that they sent.

An interceptor, so that no method can be forgotten.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
import structlog

from allocscope.collector.tokens import Token, bearer_of, find
from allocscope.collector.watched import Watched

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
MOST_TOLD = 256


class Admission(grpc.aio.ServerInterceptor):
    """Asks for what the settings ask for."""

    def __init__(self, *, tokens: Watched[tuple[Token, ...]] | None, by_certificate: bool) -> None:
        """`by_certificate`: whether who calls showed one, whose names are then the nodes that he may speak for."""
        self._tokens, self._by_certificate = tokens, by_certificate
        self._told: set[str] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method, behind the question who calls."""
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = bearer_of(metadata.get("authorization"))
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._guarded(handler.stream_stream, given), *codec)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._guarded(handler.stream_unary, given), *codec)
        raise TypeError(f"{handler_call_details.method} is of a kind that is not guarded")

    def _guarded(self, method: Callable[..., Any], given: str | None) -> Callable[..., Any]:
        async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
            token = await self._token(given, context)
            return await method(self._checked(requests, token, context), context)

        return guarded

    async def _token(self, given: str | None, context: Context) -> Token | None:
        if self._tokens is None:
            return None
        self._tokens.renewed()
        token = find(self._tokens.made, given) if given else None
        if token is None:
            text = (
                "the token is none that is known here"
                if given
                else "a token is asked for (the daemon's collector_token_file)"
            )
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, text)
        return token

    async def _checked(self, requests: AsyncIterator[Any], token: Token | None, context: Context) -> AsyncIterator[Any]:
        """The requests, of which the hello names the node."""
        async for request in requests:
            if request.WhichOneof("message") == "hello":
                await self._check_node(request.hello.node, token, context)
            yield request

    async def _check_node(self, node: str, token: Token | None, context: Context) -> None:
        if token is not None and not token.is_for(node):
            text = f"the token is not for node {node[:64]!r}, but for {', '.join(token.nodes)[:200]}"
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, text)
        if not self._by_certificate:
            return
        names = sorted(set(names_of(context.auth_context())))
        if node not in names:
            text = f"the certificate is not for node {node[:64]!r}, but for {', '.join(names)[:200] or 'none'}"
            remedy = "issue one that names the node, or set the daemon's `node`"
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"{text}; {remedy}")

    async def _refuse(self, context: Context, code: grpc.StatusCode, text: str) -> None:
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            log.warning("a daemon is refused", why=text, peer=context.peer(), further="not logged")
        await context.abort(code, text)


def names_of(auth_context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """The names in a certificate, as gRPC tells them: of its SAN, and its CN; its CA stands for both."""
    kinds = ("x509_subject_alternative_name", "x509_common_name")
    return [name.decode("utf-8", "replace") for kind in kinds for name in auth_context.get(kind, ()) if name]
