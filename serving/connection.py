"""HTTP connections that clients cannot hold open with half a request, and whose parser errors are JSON too."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import override

from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_server import Server

from serving.errors import ApiError, error_body, error_response
from serving.json_text import dump_json

BACKLOG = 1024
LINGERING_SECONDS = 2.0
KEEPALIVE_SECONDS = 75.0


class GuardedConnection(RequestHandler):
    """aiohttp's connection with a deadline for headers.

    aiohttp itself only closes connections that are idle after a whole request, and answers malformed HTTP in plain text,
    out of the reach of middlewares.
    """

    __slots__ = ("_header_deadline", "_header_timeout_seconds")

    def __init__(self, server: Server, *, header_timeout_seconds: float, loop: asyncio.AbstractEventLoop):
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGERING_SECONDS,
            access_log=None,  # pyrefly: ignore[bad-argument-type]
            auto_decompress=False,  # body.py unpacks, under its own limit and off the event loop
        )
        self._header_timeout_seconds = header_timeout_seconds
        self._header_deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._start_header_deadline()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages or self._current_request is not None:
            self._stop_header_deadline()
        elif self._header_deadline is None and self._waiter is not None:
            # The first part of the next request on a connection that is kept alive; without `_waiter`, the rest of a body.
            self._start_header_deadline()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_header_deadline()
        super().connection_lost(exc)

    @override
    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what no middleware sees, above all bytes that are not HTTP; always closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, no other can be sent")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.logger.error("error outside of the application", exc_info=exc)
            text = "internal error; the server's log says more"
        else:
            # The parser's own message quotes the bytes it stumbled over; its first line says what they are.
            text = f"not a valid HTTP request: {(message or HTTPStatus(status).phrase).splitlines()[0].rstrip(':')[:200]}"
        response = error_response(ApiError(status, text))
        response.force_close()
        return response

    def _start_header_deadline(self) -> None:
        self._header_deadline = self._loop.call_later(self._header_timeout_seconds, self._on_header_deadline)

    def _stop_header_deadline(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _on_header_deadline(self) -> None:
        self._header_deadline = None
        if self._messages or self._current_request is not None or self.transport is None:
            return
        error = ApiError(HTTPStatus.REQUEST_TIMEOUT, f"no whole request within {self._header_timeout_seconds:g} seconds")
        body = dump_json(error_body(error))
        head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)  # pyrefly: ignore[missing-attribute]
        self.force_close()


class GuardedSite(web.BaseSite):
    """Serves a runner's application on a bound socket through guarded connections."""

    __slots__ = ("_header_timeout_seconds", "_sock")

    def __init__(self, runner: web.AppRunner, sock: socket.socket, *, header_timeout_seconds: float):
        super().__init__(runner, backlog=BACKLOG)
        self._sock = sock
        self._header_timeout_seconds = header_timeout_seconds

    @property
    def name(self) -> str:
        """Where it listens, as a URL."""
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if self._sock.family == socket.AF_INET6 else f"http://{host}:{port}"

    async def start(self) -> None:
        """Accept connections."""
        await super().start()
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None

        def connection() -> GuardedConnection:
            return GuardedConnection(server, header_timeout_seconds=self._header_timeout_seconds, loop=loop)

        self._server = await loop.create_server(connection, sock=self._sock, backlog=self._backlog)
