from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import MODEL_NAME, FakeEngine

BODY = json.dumps({"model": MODEL_NAME, "prompt": "abc", "max_tokens": 400}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def connected(server: Served, **options: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection, reset at the end if the test has not closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def exchange(server: Served, data: bytes) -> bytes:
    """Send bytes and read all that comes until the server closes."""
    async with connected(server) as (reader, writer), asyncio.timeout(10):
        writer.write(data)
        return await reader.read()


async def wait_until(condition: Callable[[], bool]) -> None:
    """The other side is another thread or process; nothing there can set an event of this loop."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def is_json_error(answer: bytes, status: int) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split()[1] == b"%d" % status and set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nBroken header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 65536 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 500 + b"\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5, 5\r\n\r\nabcde",
    ],
)
async def test_what_is_not_http_gets_a_json_400(server: Served, data: bytes):
    answer = await exchange(server, data)
    assert is_json_error(answer, 400)
    assert (await server.complete())[0] == 200


async def test_damaged_chunks_do_no_harm(server: Served):
    answer = await exchange(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n")
    assert is_json_error(answer, 400)
    assert (await server.complete())[0] == 200


async def test_many_tiny_chunks_do_not_stop_others(server: Served):
    chunked = exchange(server, HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n")
    answer, (status, _) = await asyncio.gather(chunked, server.complete())
    assert is_json_error(answer, 400)
    assert status == 200


async def test_half_a_head_is_closed_at_its_deadline(serve: Serve):
    server = await serve(header_timeout=0.1)
    for data in (b"", b"POST /v1/comp", HEAD):
        assert is_json_error(await exchange(server, data), 408)


async def test_half_a_second_head_is_closed_at_its_deadline(serve: Serve):
    server = await serve(header_timeout=0.1)
    async with connected(server) as (reader, writer), asyncio.timeout(10):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"GET /hea")
        assert is_json_error(await reader.read(), 408)


async def test_an_idle_connection_that_is_kept_alive_has_no_header_deadline(serve: Serve):
    server = await serve(header_timeout=0.1)
    async with connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.25)


async def test_half_a_body_is_closed_at_its_deadline(serve: Serve):
    server = await serve(body_timeout=0.1)
    answer = await exchange(server, HEAD + b"Content-Length: 100\r\nConnection: close\r\n\r\n{")
    assert is_json_error(answer, 408)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_leaves_aborts_its_request(serve: Serve, is_streamed: bool):
    server = await serve(FakeEngine(step_seconds=0.002))
    body = json.dumps({**json.loads(BODY), "stream": is_streamed, "ignore_eos": True}).encode()
    async with connected(server) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await wait_until(lambda: server.engine.snapshot().num_running == 1)
        if is_streamed:
            await reader.readuntil(b"data: ")
    await wait_until(lambda: server.engine.aborted != [])
    await wait_until(lambda: server.thread.snapshot().num_running == 0)
    assert await server.metric("jaxinfer_kv_blocks_free") == await server.metric("jaxinfer_kv_blocks_total")


async def test_clients_that_leave_at_any_time_leave_nothing_behind(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.001))

    async def leave_after(seconds: float) -> None:
        async with connected(server) as (_, writer):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            await asyncio.sleep(seconds)

    await asyncio.gather(*(leave_after(k * 0.004) for k in range(60)))
    await wait_until(lambda: server.thread.snapshot().num_running == 0 and server.thread.snapshot().num_waiting == 0)
    status, body = await server.complete("abc")
    assert (status, body["choices"][0]["text"]) == (200, "abca")


async def test_a_client_that_takes_nothing_is_cut_off(serve: Serve):
    server = await serve(FakeEngine(max_model_len=100_000, step_seconds=0.01), body_timeout=0.3)
    # Echoes far larger than what the system keeps for a connection.
    fields = {"model": MODEL_NAME, "prompt": [97] * 90_000, "max_tokens": 9_000, "n": 128, "echo": True, "stream": True}
    body = json.dumps(fields).encode()
    async with connected(server, limit=1024) as (_, writer):
        writer.transport.pause_reading()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await wait_until(lambda: server.engine.aborted != [])
