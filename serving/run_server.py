"""The life of a server process: bind, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

from jaxinfer.errors import ConfigError
from serving.app import create_app
from serving.config import ServerConfig
from serving.connection import BACKLOG, GuardedSite
from serving.engine_thread import EngineThread
from serving.step_engine import StepEngine

LAST_WRITES_SECONDS = 3.0
"""How long handlers get, once their requests have ended, to write out what they hold."""
THREAD_END_SECONDS = 15.0
"""For the running step, and for cached blocks to be written to disk."""


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket. Done before anything slow, so that a port that is taken is known at once.

    Raises:
        ConfigError: naming host and port, when they cannot be listened on.
    """
    where = f"{config.host} port {config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {config.host!r} is not an address of this machine: {error.strerror}", option="--host") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Lets a port be used again right after its last server ended; it does not share one with a live server.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another --port", option="--port") from error
    sock.setblocking(False)
    return sock


class _Signals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.drain.is_set() else self.drain).set()


async def _first_of(*waits: asyncio.Task[object]) -> None:
    """Wait until one of the tasks is done; the others are cancelled."""
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        for wait in waits:
            with suppress(asyncio.CancelledError):
                await wait


async def serve(engine: EngineThread, config: ServerConfig, sock: socket.socket, announce: Callable[[str], None]) -> bool:
    """Serve until a signal ends it; returns whether the engine was loaded by then.

    While the engine loads, /health answers 200 and everything else 503.

    Raises:
        Exception: whatever loading the engine raised.
    """
    signals = _Signals()
    runner = web.AppRunner(create_app(engine, config), handler_cancellation=True, shutdown_timeout=LAST_WRITES_SECONDS)
    await runner.setup()
    try:
        site = GuardedSite(runner, sock, header_timeout_seconds=config.header_timeout)
        await site.start()
        engine.start()
        loading, draining = asyncio.create_task(engine.wait_loaded()), asyncio.create_task(signals.drain.wait())
        await _first_of(loading, draining)
        if signals.drain.is_set():
            return not loading.cancelled()
        announce(f"serving {config.served_model_name or engine.description.model_name} at {site.name}")
        await signals.drain.wait()
        announce(f"draining: running requests have {config.shutdown_timeout:g} s; a second signal ends them now")
        await _first_of(asyncio.create_task(engine.drain(config.shutdown_timeout)), asyncio.create_task(signals.hurry.wait()))
        engine.end_requests("the server is shutting down")
        return True
    finally:
        await runner.cleanup()


def run_server(build_engine: Callable[[], StepEngine], config: ServerConfig, *, announce: Callable[[str], None] | None = None) -> int:
    """Bind, load and serve; returns the exit code.

    Raises:
        ConfigError: when the port cannot be had.
        Exception: whatever loading the engine raised.
    """
    say = announce or _print_line
    engine = EngineThread(build_engine, step_timeout_seconds=config.step_timeout, max_queue=config.max_queue)
    sock = bind(config)
    is_loaded = asyncio.run(serve(engine, config, sock, say))
    if not (is_loaded and engine.stop(THREAD_END_SECONDS)):
        # The thread is deep in loading or in a step that hangs; nothing in it can be told to end.
        say("ended while the engine was busy")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _print_line(message: str) -> None:
    print(f"jaxinfer: {message}", file=sys.stderr, flush=True)
