"""The real application on a real port, in front of a fake engine."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from serving.app import create_app
from serving.config import ServerConfig
from serving.connection import GuardedSite
from serving.engine_thread import EngineThread
from serving.run_server import bind
from tests.serving.fake_engine import MODEL_NAME, FakeEngine


@dataclass
class Served:
    """A running server and hands on its parts."""

    url: str
    port: int
    engine: FakeEngine
    thread: EngineThread
    session: aiohttp.ClientSession
    clients: AsyncExitStack

    async def openai(self, **options: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))
        return await self.clients.enter_async_context(client)

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Send JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        async with self.session.post(self.url + path, data=data, headers=headers, **options) as response:
            return response.status, json.loads(await response.text())

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.text()

    async def complete(self, prompt: Any = "abc", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, **fields})

    async def chat(self, text: str = "hi", **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"model": MODEL_NAME, "messages": messages, "max_tokens": 4, **fields})

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, checked to be whole lines; '[DONE]' stays a string."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = await response.text()
        assert text.endswith("\n\n")
        lines = text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]

    async def metric(self, name: str) -> float:
        _, text = await self.get("/metrics")
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name} "))


@asynccontextmanager
async def served(
    engine: FakeEngine | None = None, *, step_timeout: float = 30.0, is_started: bool = True, **options: Any
) -> AsyncIterator[Served]:
    engine = engine or FakeEngine()
    config = ServerConfig(port=0, **options)
    thread = EngineThread(lambda: engine, step_timeout_seconds=step_timeout, max_queue=config.max_queue)
    runner = web.AppRunner(create_app(thread, config), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    sock: socket.socket = bind(config)
    site = GuardedSite(runner, sock, header_timeout_seconds=config.header_timeout)
    await site.start()
    if is_started:
        thread.start()
        await thread.wait_loaded()
    async with aiohttp.ClientSession() as session, AsyncExitStack() as clients:
        yield Served(site.name, sock.getsockname()[1], engine, thread, session, clients)
    engine.gate.set()
    if is_started:
        assert thread.stop(5.0)
    await runner.cleanup()


Serve = Callable[..., Coroutine[Any, Any, Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server, with an engine and options of the test's own."""
    async with AsyncExitStack() as stack:

        async def start(*args: Any, **options: Any) -> Served:
            return await stack.enter_async_context(served(*args, **options))

        yield start


@pytest.fixture
async def server(serve: Serve) -> Served:
    """A server with the defaults."""
    return await serve()
