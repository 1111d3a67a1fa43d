"""Who may ask over HTTP, where the settings name tokens: programs by Bearer, browsers by Basic, whose password is the token."""

from __future__ import annotations

import base64
import binascii
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from allocscope.collector.tokens import Token, bearer_of, find
from allocscope.collector.watched import Watched

OPEN = ("/healthz", "/readyz")
"""For whoever starts and watches processes; they tell no figures."""


class HttpAdmission:
    """Around the application."""

    def __init__(self, app: ASGIApp, tokens: Watched[tuple[Token, ...]]) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN or self._may(Headers(scope=scope).get("authorization")):
            await self._app(scope, receive, send)
            return
        message = "a token is asked for, as `Authorization: Bearer TOKEN`, or in a browser as the password"
        refusal = JSONResponse(
            {"error": {"code": "unauthenticated", "message": message, "details": {}}},
            HTTPStatus.UNAUTHORIZED,
            {"WWW-Authenticate": 'Basic realm="Allocscope", charset="UTF-8"', "Cache-Control": "no-store"},
        )
        await refusal(scope, receive, send)

    def _may(self, authorization: str | None) -> bool:
        given = bearer_of(authorization) or _password_of(authorization)
        self._tokens.renewed()
        return given is not None and find(self._tokens.made, given) is not None


def _password_of(authorization: str | None) -> str | None:
    """RFC 7617."""
    kind, _, encoded = (authorization or "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode("utf-8", "replace").partition(":")[2] or None
    except (binascii.Error, ValueError):
        return None
