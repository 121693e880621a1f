"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from aiohttp import web

from serving.errors import ApiError, error_body, to_api_error
from serving.json_text import dump_json

logger = logging.getLogger(__name__)

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""The last one keeps reverse proxies from collecting a stream before they pass it on."""
DONE = b"data: [DONE]\n\n"


def encode_event(event: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + dump_json(event) + b"\n\n"


async def send_events(
    request: web.Request, batches: AsyncIterator[list[dict[str, Any]]], *, write_timeout_seconds: float
) -> web.StreamResponse:
    """Answer with a stream; each batch of events is one write.

    The status is sent before the first event is there, so a later fault is an event with `error`, and no [DONE] comes
    after it. A client that takes nothing for `write_timeout_seconds` is cut off.
    """
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)

    async def write(data: bytes) -> None:
        async with asyncio.timeout(write_timeout_seconds):
            await response.write(data)

    try:
        try:
            async for events in batches:
                if events:
                    await write(b"".join(map(encode_event, events)))
            await write(DONE)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            api_error = to_api_error(error)
            if api_error.status == HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, ApiError):
                logger.exception("unhandled error in a stream of %s", request.path)
            await write(encode_event(error_body(api_error)))
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client took nothing of its stream") from error
    await response.write_eof()
    return response
