"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from serving.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/", "/debug/kv"})
"""Probes, and the pages, which hold nothing secret and ask for the key themselves."""


def require_api_key(keys: Sequence[str]) -> Middleware:
    """A middleware that lets in who sends one of the keys; every route but the open ones is covered, unknown ones too."""
    # Bytes: compare_digest refuses text outside ASCII, which a client may well send.
    allowed = [key.encode() for key in keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            key = given.strip().encode("utf-8", "surrogateescape")
            # Every key is compared, so that the time taken does not tell which one was near.
            matches = [hmac.compare_digest(key, one) for one in allowed]
            if scheme.lower() != "bearer" or not any(matches):
                message = "a valid API key is needed: send 'Authorization: Bearer KEY'"
                raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        return await handler(request)

    return middleware
