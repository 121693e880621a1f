"""--max-queue: who may wait, who is refused, and that nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from jaxinfer.client import EngineSnapshot
from jaxinfer.errors import ConfigError, QueueFullError, RequestError
from serving.admission import MAX_RETRY_SECONDS, Admission
from serving.config import ServerConfig
from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import MODEL_NAME, FakeEngine
from tests.serving.test_bad_requests import assert_error
from tests.serving.test_connections import wait_until
from tests.serving.test_engine_thread import make_request, read_text, start

PLACES = 2


@asynccontextmanager
async def held_back(server: Served, count: int) -> AsyncIterator[list[asyncio.Task]]:
    """So many requests, the first ones in a step that does not end before the block does."""
    server.engine.gate.clear()
    tasks = [asyncio.create_task(server.complete("abc", request_id=f"held-{k}", max_tokens=4)) for k in range(count)]
    await wait_until(lambda: server.thread.snapshot().num_running + server.thread.snapshot().num_waiting == count)
    yield tasks
    server.engine.gate.set()
    for status, body in await asyncio.gather(*tasks):
        assert (status, body["choices"][0]["text"]) == (200, "abca")


async def test_what_neither_runs_nor_may_wait_is_refused(serve: Serve):
    server = await serve(FakeEngine(max_num_seqs=PLACES), max_queue=3)
    async with held_back(server, PLACES + 3):
        async with server.session.post(
            server.url + "/v1/completions", json={"model": MODEL_NAME, "prompt": "late", "stream": True}
        ) as response:
            assert int(response.headers["Retry-After"]) >= 1
            body = await response.json()
            assert_error(response.status, body, 429)
        assert body["error"]["type"] == "rate_limit_error"
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert_error(*await server.chat(), 429)
        with pytest.raises(openai.RateLimitError):
            await (await server.openai()).completions.create(model=MODEL_NAME, prompt="late")
        assert await server.metric("jaxinfer_requests_refused_total") == 3
    assert (await server.complete())[0] == 200
    assert not any(bytes(request.prompt_token_ids) == b"late" for request in server.engine.requests_seen)


async def test_an_idle_engine_takes_as_many_as_run_and_wait(serve: Serve):
    server = await serve(FakeEngine(max_num_seqs=PLACES), max_queue=1)
    assert all(status == 200 for status, _ in await asyncio.gather(*(server.complete() for _ in range(PLACES + 1))))
    assert await server.metric("jaxinfer_requests_refused_total") == 0


async def test_the_prompts_of_one_request_come_in_together_or_not_at_all(serve: Serve):
    server = await serve(FakeEngine(max_num_seqs=PLACES), max_queue=3)
    async with held_back(server, PLACES + 1):
        assert_error(*await server.complete(["a", "b", "c"]), 429)
        assert_error(*await server.complete("abc", n=3), 429)
        assert await server.metric("jaxinfer_requests_refused_total") == 4
        assert server.thread.snapshot().num_waiting == 1
        fits = asyncio.create_task(server.complete(["d", "e"], max_tokens=1))
        await wait_until(lambda: server.thread.snapshot().num_waiting == 3)
        assert_error(*await server.complete(), 429)
    assert [choice["text"] for choice in (await fits)[1]["choices"]] == ["d", "e"]


async def test_what_can_never_be_taken_is_a_wrong_request(serve: Serve):
    server = await serve(FakeEngine(max_num_seqs=PLACES), max_queue=3)
    assert_error(*await server.complete(["a"] * 6), 400, param="prompt")
    assert_error(*await server.complete("a", n=6), 400, param="n")
    assert (await server.complete(["a"] * 5))[0] == 200
    assert await server.metric("jaxinfer_requests_refused_total") == 0


async def test_whoever_ends_may_send_the_next_one():
    """As many clients as there are places, each sending again as soon as it has its answer, are never refused."""
    engine = FakeEngine(max_num_seqs=PLACES)
    thread = await start(engine, max_queue=2)

    async def client(name: str) -> None:
        for k in range(50):
            assert await read_text(thread.submit(make_request(f"{name}-{k}", max_tokens=1 + k % 3))) == "abc"[: 1 + k % 3]

    await asyncio.gather(*(client(f"c{k}") for k in range(PLACES + 2)))
    assert thread.num_refused == 0
    assert thread.stop(5.0)


async def test_places_of_aborted_requests_are_free_again():
    engine = FakeEngine(max_num_seqs=1)
    thread = await start(engine, max_queue=1)
    engine.gate.clear()
    running, waiting = thread.submit(make_request("a", 400)), thread.submit(make_request("b", 400))
    with pytest.raises(QueueFullError):
        thread.submit(make_request("c"))
    await running.aclose()
    await waiting.aclose()
    engine.gate.set()
    await wait_until(lambda: thread.snapshot().num_running == 0 and thread.snapshot().num_waiting == 0)
    await wait_until(lambda: not engine.has_work)
    assert await asyncio.gather(*(read_text(thread.submit(make_request(name))) for name in "de")) == ["abcab"] * 2
    assert thread.stop(5.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def settled(admission: Admission, *, running: int, waiting: int, taken: int = 0, finished: int = 0) -> None:
    snapshot = EngineSnapshot(num_running=running, num_waiting=waiting)
    admission.settle(snapshot, num_taken=taken, num_finished=finished, is_idle=running == waiting == 0)


def refusal(admission: Admission, count: int = 1) -> int:
    with pytest.raises(QueueFullError) as caught:
        admission.admit(count, num_requests=count, max_num_seqs=4)
    return caught.value.retry_after_seconds


def test_retry_after_follows_the_rate_of_finishes():
    clock = Clock()
    admission = Admission(2, clock)
    admission.admit(6, num_requests=6, max_num_seqs=4)
    assert refusal(admission) == 1, "nothing is known yet"
    settled(admission, running=4, waiting=2, taken=6)
    for _ in range(5):
        clock.now += 30.0
        settled(admission, running=3, waiting=2, finished=1)
        admission.admit(1, num_requests=1, max_num_seqs=4)
        settled(admission, running=4, waiting=2, taken=1)
    assert refusal(admission) == 30
    assert refusal(admission, 3) == 90
    clock.now += 1e6
    assert refusal(admission) == MAX_RETRY_SECONDS
    settled(admission, running=0, waiting=0)
    admission.admit(6, num_requests=6, max_num_seqs=4)
    assert refusal(admission) == 1, "an idle engine forgets its rate"


def test_free_places_do_not_help_where_blocks_are_missing():
    admission = Admission(2)
    settled(admission, running=1, waiting=2)
    assert refusal(admission) == 1


def test_without_a_limit_all_come_in():
    admission = Admission(None)
    admission.admit(10_000, num_requests=10_000, max_num_seqs=1)
    admission.admit(10_000, num_requests=1, max_num_seqs=1)
    assert admission.num_refused == 0


def test_what_never_fits():
    with pytest.raises(RequestError, match=r"at most 6 here \(4 run at once, 2 may wait\), got 7"):
        Admission(2).admit(7, num_requests=1, max_num_seqs=4)


@pytest.mark.parametrize("fields", [{"max_queue": 0}, {"max_queue": -1}, {"max_queue": True}, {"debug_routes": "maybe"}])
def test_options_are_checked(fields: dict):
    with pytest.raises(ConfigError, match="--" + next(iter(fields)).replace("_", "-")):
        ServerConfig(**fields)
