"""A client leaves at the moments that only a server knows: all blocks come back, and nobody else notices.

The engine is the real one around the lookup model. Each moment is held by an event until it has come; the engine's own moments
are in `tests/engine/test_abort_moments.py`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from jaxinfer.engine import Engine
from jaxinfer.request import RequestDelta
from serving.app import create_app
from serving.config import ServerConfig
from serving.connection import GuardedSite
from serving.engine_thread import EngineThread
from serving.run_server import bind
from serving.step_engine import EngineState
from tests.engine.lookup_model import continuation
from tests.engine.tiered_engine import CANARY, assert_idle, make_base, tiered_engine
from tests.serving.test_connections import wait_until

ROUNDS = pytest.mark.parametrize("num_rounds", [10, pytest.param(100, marks=pytest.mark.nightly)])
TEXT = "a victim's prompt of several blocks"


@pytest.fixture(scope="module")
def base() -> Engine:
    return make_base()


class Gate:
    """Lets an engine make as many steps as it was given, or any number once it is open."""

    def __init__(self, engine: Engine):
        self._step = engine.step
        self._permits = threading.Semaphore(0)
        self.is_open = True
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[RequestDelta]:
        if not self.is_open:
            assert self._permits.acquire(timeout=60)
        return self._step()

    def close(self, num_steps: int) -> None:
        self._permits = threading.Semaphore(num_steps)
        self.is_open = False

    def permit(self) -> None:
        self._permits.release()

    def open(self) -> None:
        self.is_open = True
        self.permit()


@dataclass
class Hold:
    """Stands in for a function and holds each call that is wanted until it is let go."""

    call: Callable[..., Any]
    is_wanted: Callable[..., bool]
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    thread: str = ""

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.is_wanted(*args):
            return self.call(*args, **options)
        self.thread = threading.current_thread().name
        self.reached.set()
        assert self.released.wait(60)
        result = self.call(*args, **options)
        self.done.set()
        return result

    def again(self) -> None:
        for event in (self.reached, self.released, self.done):
            event.clear()

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 60), "the moment never came"


@dataclass
class LookupServer:
    """The application in front of a real engine."""

    engine: Engine
    thread: EngineThread
    port: int
    runner: web.AppRunner
    session: aiohttp.ClientSession

    async def complete(self, prompt: list[int], max_tokens: int = 8) -> None:
        """An answer, compared with the oracle."""
        body = {
            "model": "lookup",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with self.session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        assert answer["choices"][0]["token_ids"] == continuation(prompt, max_tokens)

    @asynccontextmanager
    async def asked(self, prompt: Any = TEXT, **fields: Any) -> AsyncGenerator[None]:
        """A client that sends a request and, at the end of the block, is gone, which the server has seen by then."""
        assert self.runner.server is not None
        others = set(self.runner.server.connections)
        body = json.dumps({"model": "lookup", "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True} | fields).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            yield
            mine = set(self.runner.server.connections) - others
            assert mine, "the server answered before the client left"
        finally:
            writer.transport.abort()
        await wait_until(lambda: not mine & set(self.runner.server.connections if self.runner.server else ()))

    async def settle(self) -> None:
        """Wait until the engine has nothing to do, and assert that nothing is left of anybody."""
        await wait_until(lambda: not (self.thread._streams or self.thread._aborts or self.thread._arrivals or self.engine.has_work))
        await wait_until(lambda: self.thread._step_started is None)
        assert_idle(self.engine)


@asynccontextmanager
async def serve(engine: Engine) -> AsyncGenerator[LookupServer]:
    """The server, and that neither a thread nor a task stays when it has ended."""
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    config = ServerConfig(port=0)
    thread = EngineThread(lambda: engine)
    runner = web.AppRunner(create_app(thread, config), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    sock = bind(config)
    await GuardedSite(runner, sock, header_timeout_seconds=config.header_timeout).start()
    thread.start()
    await thread.wait_loaded()
    async with aiohttp.ClientSession() as session:
        yield LookupServer(engine, thread, sock.getsockname()[1], runner, session)
    assert thread.stop(30.0)
    await runner.cleanup()
    await wait_until(lambda: not {task for task in asyncio.all_tasks() - tasks if task is not asyncio.current_task()})
    left = {one for one in set(threading.enumerate()) - threads if not one.name.startswith("asyncio")}
    for one in left:
        await asyncio.to_thread(one.join, 10)
    assert not any(one.is_alive() for one in left)


@ROUNDS
async def test_while_the_prompt_is_tokenized(base: Engine, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Hold(base.tokenizer.encode, lambda text, *_: text == TEXT)
    monkeypatch.setattr(base.tokenizer, "encode", hold)
    async with serve(tiered_engine(base)) as server:
        for _ in range(num_rounds):
            hold.again()
            async with server.asked():
                await hold.wait()
            await server.complete(CANARY)
            hold.released.set()
            assert await asyncio.to_thread(hold.done.wait, 60) and hold.thread.startswith("text")
            await server.complete(CANARY)
            await server.settle()
        assert server.engine.counters.num_prompt_tokens == 2 * num_rounds * len(CANARY), "the engine has seen a request of somebody gone"


@ROUNDS
async def test_while_its_constraints_are_compiled(base: Engine, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread is at it when the client leaves. Grammars will be compiled at the same place."""
    hold = Hold(base.tokenizer.encode, lambda text, *_: text == "banned")
    monkeypatch.setattr(base.tokenizer, "encode", hold)
    async with serve(tiered_engine(base)) as server:
        for number in range(num_rounds):
            hold.again()
            async with server.asked([number, *range(30)], bad_words=["banned"], n=1 + number % 2):
                await hold.wait()
                assert hold.thread == "engine"
                canary = asyncio.create_task(server.complete(CANARY))
            await wait_until(lambda: len(server.thread._aborts) == 1)
            hold.released.set()
            await canary
            await server.settle()
        finished = server.engine.snapshot().finished_by_reason
        assert finished is not None and finished["abort"] == num_rounds


@ROUNDS
async def test_while_its_answer_is_written(base: Engine, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes some events and then nothing: the handler is in a write that does not end when the client leaves."""
    write, is_writing, num_free = web.StreamResponse.write, asyncio.Event(), 0

    async def held_write(response: web.StreamResponse, content: Any) -> None:
        nonlocal num_free
        num_free -= 1
        if num_free < 0:
            is_writing.set()
            await asyncio.Event().wait()
        await write(response, content)
        gate.permit()

    monkeypatch.setattr(web.StreamResponse, "write", held_write)
    engine = tiered_engine(base)
    gate = Gate(engine)
    async with serve(engine) as server:
        for number in range(num_rounds):
            is_writing.clear()
            num_free = number % 3
            # Enough for a first token; every write brings another, and shows it whether it is text or not.
            gate.close(num_steps=3)
            async with server.asked([number, *range(30)], stream=True, return_token_ids=True):
                await asyncio.wait_for(is_writing.wait(), 60)
            gate.open()
            await server.complete(CANARY)
            await server.settle()
        finished = engine.snapshot().finished_by_reason
        assert finished is not None and finished["abort"] == num_rounds


@ROUNDS
async def test_while_the_server_drains(base: Engine, num_rounds: int) -> None:
    """Those who stay get their answers, and the next server is as the last."""
    for number in range(num_rounds):
        engine = tiered_engine(base)
        gate = Gate(engine)
        async with serve(engine) as server:
            await server.complete(CANARY)
            gate.close(num_steps=3 + number % 3)
            staying = asyncio.create_task(server.complete([number, 4, 5], max_tokens=20))
            async with server.asked([number, *range(30)], stream=number % 2 == 0):
                await wait_until(lambda: len(server.thread._streams) == 2)
                draining = asyncio.create_task(server.thread.drain(60.0))
                await wait_until(lambda: server.thread.state is EngineState.DRAINING)
            gate.open()
            assert await draining is True
            await staying
            await server.settle()


@ROUNDS
async def test_a_drain_that_ends_requests(base: Engine, num_rounds: int) -> None:
    """Requests that do not end in time are ended: queued, in a step, or when the engine is closed with a step in flight."""
    for number in range(num_rounds):
        engine = tiered_engine(base, max_num_seqs=2)
        gate = Gate(engine)
        async with serve(engine) as server:
            await server.complete(CANARY)
            gate.close(num_steps=number % 5)
            async with (
                server.asked([number, *range(30)], n=1 + number % 3),
                server.asked([number, 3]),
                server.asked([number, 4], stream=True),
            ):
                await wait_until(lambda: len(server.thread._streams) == 3)
                assert await server.thread.drain(0.0) is False
                server.thread.end_requests("the server is shutting down")
                if number % 2:
                    stopping = asyncio.create_task(asyncio.to_thread(server.thread.stop, 30.0))
                    await wait_until(lambda: server.thread.state is EngineState.STOPPED)
                    gate.open()
                    assert await stopping
            gate.open()
        assert_idle(engine)
