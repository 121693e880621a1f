"""Every error answer has OpenAI's shape and is made here: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from jaxinfer.errors import EngineDeadError, QueueFullError, RequestError
from serving.json_text import dump_json

logger = logging.getLogger(__name__)

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class ApiError(Exception):
    """An answer other than 200. The message goes to the client, so it never holds paths, addresses or reprs of exceptions."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}


def error_type(status: int) -> str:
    """OpenAI's `type` of a status."""
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def to_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception; one that nobody foresaw is a 500 that says nothing about our insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param)
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(error.retry_after_seconds)}
        return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error), code="rate_limit_exceeded", headers=headers)
    if isinstance(error, EngineDeadError):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_unavailable")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log says more", code="internal_error")


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error, also sent as an event of a stream."""
    return {"error": {"message": error.message, "type": error_type(error.status), "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> web.Response:
    """The one place that makes error answers."""
    body = dump_json(error_body(error))
    return web.Response(status=error.status, body=body, headers=error.headers, content_type="application/json", charset="utf-8")


def _from_http_exception(request: web.Request, error: web.HTTPException) -> web.Response:
    messages = {
        HTTPStatus.NOT_FOUND: f"no such route: {request.method} {request.path:.80}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method:.20} is not allowed on {request.path:.80}",
    }
    response = error_response(ApiError(error.status, messages.get(HTTPStatus(error.status), error.reason)))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception of a handler into an error answer. Faults of the parser never get here: see connection.py."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _from_http_exception(request, error)
    except ConnectionError:
        raise
    except Exception as error:
        api_error = to_api_error(error)
        if api_error.status == HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, ApiError):
            logger.exception("unhandled error in %s %s", request.method, request.path)
        return error_response(api_error)
