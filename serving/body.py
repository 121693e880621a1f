"""The one reader of request bodies: media type, encoding and size are settled here, then the JSON itself."""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Any

from aiohttp import web

from serving.errors import ApiError
from serving.json_text import JsonError, parse_json

DECOMPRESSORS = {"gzip": (16 + zlib.MAX_WBITS,), "deflate": (zlib.MAX_WBITS, -zlib.MAX_WBITS)}
"""zlib's window sizes to try. Clients send `deflate` with zlib's header, as the standard says, or without."""
PARSE_INLINE_BYTES = 64 << 10
"""Larger bodies are parsed off the event loop."""


async def read_json(request: web.Request, *, max_bytes: int, timeout_seconds: float, executor: Executor) -> dict[str, Any]:
    """Read a body that must be one JSON object.

    Raises:
        ApiError: 415 for another media type, charset or compression, 413 over `max_bytes` (as sent or unpacked), 408 when
            the body is not there in time, 400 for everything else that is not a JSON object in UTF-8.
    """
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(timeout_seconds):
            raw = await _read_bytes(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {timeout_seconds:g} seconds") from error
    encoding = _content_encoding(request)
    if len(raw) <= PARSE_INLINE_BYTES and encoding not in DECOMPRESSORS:
        return _parse_object(raw)
    return await asyncio.get_running_loop().run_in_executor(executor, _unpack_and_parse, raw, encoding, max_bytes)


def _check_headers(request: web.Request, max_bytes: int) -> None:
    if request.content_type != "application/json":
        got = request.content_type[:80] if "Content-Type" in request.headers else "none"
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be application/json, got {got}")
    charset = (request.charset or "utf-8").lower()
    if charset not in ("utf-8", "utf8"):
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the charset must be utf-8, got {charset:.40}")
    encoding = _content_encoding(request)
    if encoding not in ("", "identity", *DECOMPRESSORS):
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding must be gzip, deflate or absent, got {encoding:.40}")
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)


def _content_encoding(request: web.Request) -> str:
    return request.headers.get("Content-Encoding", "").strip().lower()


async def _read_bytes(request: web.Request, max_bytes: int) -> bytes:
    """The body as sent: connections are made not to unpack it (connection.py), so that its size is known first."""
    chunks = bytearray()
    try:
        while chunk := await request.content.readany():
            chunks += chunk
            if len(chunks) > max_bytes:
                raise _too_large(max_bytes)
    except web.RequestPayloadError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body is damaged: it does not fit its Content-Length or chunks") from error
    return bytes(chunks)


def _unpack_and_parse(raw: bytes, encoding: str, max_bytes: int) -> dict[str, Any]:
    return _parse_object(_unpack(raw, encoding, max_bytes) if encoding in DECOMPRESSORS else raw)


def _unpack(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    for window_bits in DECOMPRESSORS[encoding]:
        decompressor = zlib.decompressobj(window_bits)
        try:
            unpacked = decompressor.decompress(raw, max_bytes + 1)
        except zlib.error:
            continue
        if len(unpacked) > max_bytes:
            raise _too_large(max_bytes)
        if decompressor.eof and not decompressor.unused_data:
            return unpacked
    raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not whole, valid {encoding}")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is too large: at most {max_bytes} bytes are allowed")


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from error
    except JsonError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"wrong JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body must be a JSON object, got {_json_kind(value)}")
    return value


def _json_kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return kinds[type(value)]
