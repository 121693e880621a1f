"""GET /debug/kv.json, and how the engine's thread looks at its blocks."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import pytest

from jaxinfer.client import EngineSnapshot
from jaxinfer.errors import EngineDeadError
from jaxinfer.kv.kv_map import KVGroupMap, KVMap, SequenceBlocks
from serving.protocol.kv_map import MAX_BARE_SEQUENCES, block_runs, kv_json
from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import MODEL_NAME, NUM_BLOCKS, FakeEngine
from tests.serving.test_bad_requests import assert_error
from tests.serving.test_connections import wait_until
from tests.serving.test_engine_thread import make_request, start

PATH = "/debug/kv.json"


async def look(server: Served) -> dict[str, Any]:
    status, text = await server.get(PATH)
    assert status == 200, text
    return json.loads(text)


def sequence(name: str, block_ids: tuple[int, ...], state: str = "running") -> SequenceBlocks:
    return SequenceBlocks(
        request_id=name, index=0, state=state, num_tokens=9, num_computed_tokens=8, num_cached_tokens=4, block_ids=block_ids
    )


async def test_they_are_off_by_default(server: Served):
    for path in ("/debug/kv", PATH):
        status, text = await server.get(path)
        assert_error(status, json.loads(text), 404)
    assert server.engine.num_maps == 0


async def test_the_blocks_of_running_requests(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.05, num_cached_tokens=16), debug_routes="on")
    asked = [asyncio.create_task(server.complete("x" * 40, request_id=name, max_tokens=40)) for name in ("a", "b")]
    await wait_until(lambda: server.engine.snapshot().num_kv_blocks_held == 5)
    seen = await look(server)
    blocks = base64.b64decode(seen["groups"][0]["blocks"])
    assert list(blocks) == [0x82, 1, 1, 1, 1] + [0] * (NUM_BLOCKS - 5)
    assert (seen["model"], seen["block_size"], seen["num_sequences"]) == (MODEL_NAME, 16, {"running": 2})
    assert seen["snapshot"]["num_kv_blocks_held"] == 5
    assert [(seq["request_id"], seq["block_runs"], seq["num_blocks"]) for seq in seen["sequences"]] == [
        ("cmpl-a", [1, 3], 3),
        ("cmpl-b", [1, 1, 4, 2], 3),
    ]
    assert {seq["num_cached_tokens"] for seq in seen["sequences"]} == {16}
    assert all(status == 200 for status, _ in await asyncio.gather(*asked))


def test_a_large_pool_is_small_on_the_wire():
    count = 100_000
    group = KVGroupMap(kind="full", num_blocks=count, holders=(300,) * count, is_cached=(True,) * count)
    waiting = [sequence(f"w{k}", (), "waiting") for k in range(10_000)]
    kv_map = KVMap(block_size=16, groups=(group,), sequences=(sequence("a", tuple(range(1, count + 1))), *waiting))
    answer = kv_json(kv_map, EngineSnapshot())
    assert len(json.dumps(answer)) < 200_000
    assert set(base64.b64decode(answer["groups"][0]["blocks"])) == {0x80 | 127}
    assert answer["num_sequences"] == {"running": 1, "waiting": 10_000}
    assert len(answer["sequences"]) == 1 + MAX_BARE_SEQUENCES


def test_blocks_that_a_window_left_are_in_no_run():
    answer = kv_json(KVMap(block_size=16, groups=(), sequences=(sequence("a", (0, 0, 1, 2, 9)),)), EngineSnapshot())
    assert answer["sequences"][0]["block_runs"] == [1, 2, 9, 1]
    assert answer["sequences"][0]["num_blocks"] == 3


def test_runs():
    for ids in ([], [5], [7, 8, 9, 3], [4, 3, 2], [1, 2, 2, 3]):
        runs = block_runs(ids)
        assert [first + k for first, count in zip(runs[::2], runs[1::2], strict=True) for k in range(count)] == ids
    assert block_runs([7, 8, 9, 3]) == [7, 3, 3, 1]


async def test_the_json_needs_the_key_and_the_page_asks_for_it(serve: Serve):
    server = await serve(debug_routes="on", api_key="secret")
    status, text = await server.get(PATH)
    assert_error(status, json.loads(text), 401)
    assert (await server.get(PATH, headers={"Authorization": "Bearer secret"}))[0] == 200
    assert (await server.get("/debug/kv"))[0] == 200
    off = await serve(api_key="secret")
    assert (await off.get("/debug/kv"))[0] == 404


async def test_all_who_look_at_once_cost_one_look(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serving.kv_view.FRESH_SECONDS", 600.0)
    engine = FakeEngine()
    thread = await start(engine)
    views = await asyncio.gather(*(thread.kv_view() for _ in range(20)))
    assert engine.num_maps == 1
    assert len(engine.threads) == 1
    assert all(view is views[0] for view in views)
    assert await thread.kv_view() is views[0]
    monkeypatch.setattr("serving.kv_view.FRESH_SECONDS", 0.0)
    assert await thread.kv_view() is not views[0]
    assert thread.stop(5.0)


async def test_it_waits_for_the_running_step_and_adds_none():
    engine = FakeEngine()
    thread = await start(engine)
    engine.gate.clear()
    stream = thread.submit(make_request(max_tokens=1))
    assert await asyncio.to_thread(engine.step_started.wait, 5.0)
    looking = asyncio.create_task(thread.kv_view())
    done, _ = await asyncio.wait([looking], timeout=0.05)
    assert not done
    engine.gate.set()
    assert (await looking).snapshot.num_steps == 1
    assert [delta.is_finished async for delta in stream] == [True]
    assert engine.num_maps == 1
    assert engine.snapshot().num_steps == 1
    assert thread.stop(5.0)


async def test_a_step_that_hangs_is_told(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("serving.routes.debug_kv.WAIT_SECONDS", 0.05)
    server = await serve(debug_routes="on")
    server.engine.gate.clear()
    asked = asyncio.create_task(server.complete())
    assert await asyncio.to_thread(server.engine.step_started.wait, 5.0)
    status, text = await server.get(PATH)
    assert_error(status, json.loads(text), 503)
    server.engine.gate.set()
    assert (await asked)[0] == 200
    assert (await look(server))["num_sequences"] == {}


async def test_a_fault_in_looking_ends_nothing(serve: Serve, caplog: pytest.LogCaptureFixture):
    server = await serve(debug_routes="on")
    server.engine.map_fault = RuntimeError("secret")
    status, text = await server.get(PATH)
    assert_error(status, json.loads(text), 500)
    assert "secret" not in text
    assert "secret" in caplog.text
    assert (await server.complete())[0] == 200
    server.engine.map_fault = None
    assert (await look(server))["sequences"] == []


async def test_whoever_waits_is_told_that_the_engine_died(caplog: pytest.LogCaptureFixture):
    engine = FakeEngine()
    thread = await start(engine)
    engine.gate.clear()
    engine.faults = {1: RuntimeError("broken")}
    stream = thread.submit(make_request())
    assert await asyncio.to_thread(engine.step_started.wait, 5.0)
    looking = asyncio.create_task(thread.kv_view())
    await asyncio.sleep(0)
    engine.gate.set()
    for waiting in (looking, anext(stream)):
        with pytest.raises(EngineDeadError):
            await waiting
    with pytest.raises(EngineDeadError):
        await thread.kv_view()
    assert thread.stop(5.0)


async def test_a_reader_that_left_is_not_told():
    engine = FakeEngine()
    thread = await start(engine)
    engine.gate.clear()
    stream = thread.submit(make_request(max_tokens=2))
    assert await asyncio.to_thread(engine.step_started.wait, 5.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await thread.kv_view()
    engine.gate.set()
    assert len([delta async for delta in stream]) >= 1
    assert engine.num_maps == 0
    assert (await thread.kv_view()).taken <= time.monotonic()
    assert thread.stop(5.0)
