from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from jaxinfer.errors import CheckpointError, EngineDeadError, RequestError
from jaxinfer.request import CompletionOutput, FinishReason, GenerationRequest, RequestDelta, RequestId, SamplingParams
from serving.delta_stream import DeltaStream
from serving.engine_thread import EngineThread
from serving.step_engine import EngineState
from tests.serving.conftest import Serve
from tests.serving.fake_engine import MODEL_NAME, FakeEngine
from tests.serving.test_bad_requests import assert_error
from tests.serving.test_connections import wait_until


def make_request(request_id: str = "r", max_tokens: int = 5, **fields: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, **fields)
    return GenerationRequest(request_id=RequestId(request_id), prompt_token_ids=(97, 98, 99), params=params)


async def start(engine: FakeEngine, **options: Any) -> EngineThread:
    thread = EngineThread(lambda: engine, **options)
    thread.start()
    await thread.wait_loaded()
    return thread


async def read_text(stream: DeltaStream) -> str:
    return "".join([output.text async for delta in stream for output in delta.outputs])


async def test_one_thread_owns_the_engine():
    engine = FakeEngine()
    thread = await start(engine)
    streams = [thread.submit(make_request(f"r{k}")) for k in range(20)]
    assert await asyncio.gather(*map(read_text, streams)) == ["abcab"] * 20
    assert not engine.is_closed
    assert thread.stop(5.0)
    assert engine.is_closed
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


async def test_a_slow_reader_gets_merged_deltas():
    engine = FakeEngine()
    thread = await start(engine)
    stream = thread.submit(make_request(max_tokens=200, logprobs=0, n=2))
    await wait_until(lambda: thread.snapshot().num_steps == 200)
    await asyncio.sleep(0)
    deltas = [delta async for delta in stream]
    assert len(deltas) < 3
    tokens = [token for delta in deltas for output in delta.outputs if output.index == 1 for token in output.token_ids]
    logprobs = [position for delta in deltas for output in delta.outputs if output.index == 1 for position in output.logprobs]
    assert tokens == [(98, 99, 97)[k % 3] for k in range(200)]
    assert [position.chosen.token_id for position in logprobs] == tokens
    assert thread.stop(5.0)


async def test_an_id_in_use_is_refused_and_free_again_afterwards():
    thread = await start(FakeEngine())
    first = thread.submit(make_request("same"))
    with pytest.raises(RequestError, match="request_id 'same' is in use"):
        thread.submit(make_request("same"))
    await read_text(first)
    assert await read_text(thread.submit(make_request("same"))) == "abcab"
    assert thread.stop(5.0)


async def test_closing_a_stream_aborts_its_request_alone():
    engine = FakeEngine(step_seconds=0.001)
    thread = await start(engine)
    gone, kept = thread.submit(make_request("gone", 400)), thread.submit(make_request("kept", 50))
    await anext(gone)
    await gone.aclose()
    await gone.aclose()
    assert len(await read_text(kept)) == 50
    assert engine.aborted == ["gone"]
    with pytest.raises(StopAsyncIteration):
        await anext(gone)
    assert thread.stop(5.0)


async def test_a_request_aborted_before_the_engine_saw_it_never_runs():
    engine = FakeEngine()
    engine.gate.clear()
    thread = await start(engine)
    first = thread.submit(make_request("first"))
    assert await asyncio.to_thread(engine.step_started.wait, 5.0)
    second = thread.submit(make_request("second"))
    assert thread.snapshot().num_waiting == 1
    await second.aclose()
    engine.gate.set()
    await read_text(first)
    assert [request.request_id for request in engine.requests_seen] == ["first"]
    assert thread.stop(5.0)


async def test_a_fault_in_taking_a_request_in_ends_it_alone(caplog: pytest.LogCaptureFixture):
    engine = FakeEngine()
    engine.add_faults = {RequestId("bad"): RuntimeError("at 0x7f001122"), RequestId("wrong"): RequestError("no", param="prompt")}
    thread = await start(engine)
    good, bad, wrong = (thread.submit(make_request(name)) for name in ("good", "bad", "wrong"))
    with pytest.raises(EngineDeadError, match=r"could not be taken in \(RuntimeError\)$"):
        await read_text(bad)
    with pytest.raises(RequestError, match="no"):
        await read_text(wrong)
    assert await read_text(good) == "abcab"
    assert thread.state is EngineState.READY
    assert thread.stop(5.0)


async def test_a_fault_in_a_step_ends_all_and_is_reported(serve: Serve, caplog: pytest.LogCaptureFixture):
    engine = FakeEngine(step_seconds=0.01)
    server = await serve(engine)
    engine.faults = {10: RuntimeError("secret /root/x 0x7f0011223344")}
    body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 100}
    whole, events = await asyncio.gather(server.post("/v1/completions", body), server.events("/v1/completions", body))
    assert_error(*whole, 503)
    assert_error(503, events[-1], 503)
    assert events[0]["choices"][0]["text"]
    assert "secret" not in str(whole) + str(events)
    assert "secret" in caplog.text
    assert_error(*await server.complete(), 503)
    assert_error(*await server.chat(), 503)
    assert (await server.get("/health"))[0] == 503
    assert (await server.get("/ready"))[0] == 503
    assert await server.metric("jaxinfer_requests_running") == 0


async def test_an_engines_own_error_of_one_request(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    server = await serve()

    def fail(running: Any) -> RequestDelta:
        del server.engine._running[running.request.request_id]
        output = CompletionOutput(0, finish_reason=FinishReason.ERROR)
        return RequestDelta(running.request.request_id, [output], is_finished=True, error="its blocks were lost")

    monkeypatch.setattr(server.engine, "_advance", fail)
    status, body = await server.complete()
    assert_error(status, body, 500)
    assert body["error"]["message"] == "its blocks were lost"
    events = await server.events("/v1/completions", {"model": MODEL_NAME, "prompt": "abc"})
    assert [event["error"]["message"] for event in events] == ["its blocks were lost"]


async def test_a_hung_step_shows_and_passes(serve: Serve):
    server = await serve(step_timeout=0.1)
    server.engine.gate.clear()
    asked = asyncio.create_task(server.complete())
    assert (await server.get("/health"))[0] == 200
    await wait_until(lambda: server.thread.is_hung)
    assert (await server.get("/health"))[0] == 503
    assert (await server.get("/ready"))[0] == 503
    server.engine.gate.set()
    assert (await asked)[0] == 200
    assert (await server.get("/health"))[0] == 200


async def test_while_loading(serve: Serve):
    server = await serve(is_started=False)
    assert (await server.get("/health"))[0] == 200
    for path in ("/ready", "/v1/models"):
        assert (await server.get(path))[0] == 503
    assert (await server.get("/metrics"))[0] == 200
    assert_error(*await server.complete(), 503)


async def test_what_loading_raises_comes_out():
    def build() -> FakeEngine:
        raise CheckpointError("is cut short", file="model.gguf")

    thread = EngineThread(build)
    thread.start()
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        await thread.wait_loaded()
    assert thread.state is EngineState.DEAD
    with pytest.raises(CheckpointError):
        await thread.wait_loaded()


async def test_a_drain_lets_running_requests_end_and_refuses_new_ones(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.005))
    body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 40}
    running = asyncio.create_task(server.events("/v1/completions", body))
    await wait_until(lambda: server.engine.snapshot().num_running == 1)
    draining = asyncio.create_task(server.thread.drain(10.0))
    await wait_until(lambda: server.thread.state is EngineState.DRAINING)
    assert (await server.get("/ready"))[0] == 503
    assert (await server.get("/health"))[0] == 200
    assert_error(*await server.complete(), 503)
    assert await draining is True
    events = await running
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == ("abc" * 14)[:40]


async def test_a_drain_that_takes_too_long_ends_streams_with_an_error(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.005))
    body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 400}
    tasks = [asyncio.create_task(server.events("/v1/completions", body)), asyncio.create_task(server.post("/v1/completions", body))]
    await wait_until(lambda: server.engine.snapshot().num_running == 2)
    assert await server.thread.drain(0.05) is False
    server.thread.end_requests("the server is shutting down")
    events, (status, whole) = await asyncio.gather(*tasks)
    assert "shutting down" in events[-1]["error"]["message"]
    assert_error(status, whole, 503)
    await wait_until(lambda: server.engine.snapshot().num_running == 0)
