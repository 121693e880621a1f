"""Fields beside the sampling parameters: user, cache_salt, priority, timeout; and what the cache's hits look like."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import MODEL_NAME, FakeEngine
from tests.serving.test_bad_requests import BASE, CHAT, COMPLETIONS, assert_error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_they_reach_the_engine(server: Served, path: str):
    status, _ = await server.post(path, {**BASE[path], "user": "ann", "cache_salt": "s", "timeout": 7.5, "priority": -2})
    assert status == 200
    request = server.engine.requests_seen[0]
    assert (request.user, request.cache_salt, request.timeout, request.priority) == ("ann", "s", 7.5, -2)
    for nothing in ({}, {"user": None, "cache_salt": None, "timeout": None, "priority": None}):
        await server.post(path, {**BASE[path], **nothing})
        request = server.engine.requests_seen[-1]
        assert (request.user, request.cache_salt, request.timeout, request.priority) == ("", "", None, 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("user", [5, ["a"], {}, True, "x" * 513]),
        ("cache_salt", [5, ["a"], {}, True, "x" * 513]),
        ("timeout", [0, -1, "5", True, [1], 1e9, 10**30]),
        ("priority", [2**31, -(2**31), 1.5, "1", True]),
    ],
)
async def test_wrong_values_name_their_field(server: Served, path: str, field: str, values: list[Any]):
    for value in values:
        assert_error(*await server.post(path, {**BASE[path], field: value}), 400, param=field)
    assert server.engine.requests_seen == []


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
async def test_a_priority_that_nobody_looks_at_is_refused(serve: Serve, policy: str):
    server = await serve(FakeEngine(scheduling_policy=policy))
    status, body = await server.complete(priority=1)
    assert_error(status, body, 400, param="priority")
    assert policy in body["error"]["message"]
    assert_error(*await server.chat(priority=-1), 400, param="priority")
    assert (await server.complete(priority=0))[0] == 200


async def test_a_request_that_ran_out_of_time_answers_with_what_it_has(server: Served):
    status, body = await server.complete("abc", timeout=2, max_tokens=9)
    assert status == 200
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ab", "timeout")
    assert body["usage"]["completion_tokens"] == 2
    status, body = await server.chat("abc", timeout=2, max_tokens=9)
    assert (status, body["choices"][0]["finish_reason"]) == (200, "timeout")
    events = await server.events(COMPLETIONS, {"model": MODEL_NAME, "prompt": "abc", "timeout": 2, "max_tokens": 9})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "ab"
    assert events[-2]["choices"][0]["finish_reason"] == "timeout"
    assert events[-1] == "[DONE]"
    assert await server.metric('jaxinfer_requests_finished_total{finish_reason="timeout"}') == 3


@pytest.mark.parametrize("n", [1, 3])
async def test_no_token_in_time_is_an_error(server: Served, n: int):
    for path, base in BASE.items():
        status, body = await server.post(path, {**base, "timeout": 0.5, "n": n})
        assert_error(status, body, 504)
        assert body["error"]["code"] == "request_timeout"
        (event,) = await server.events(path, {**base, "timeout": 0.5, "n": n})
        assert event["error"]["code"] == "request_timeout"
    assert_error(*await server.complete(["abc", "de"], timeout=0.5), 504)
    assert_error(504, (await server.events(COMPLETIONS, {"model": MODEL_NAME, "prompt": ["abc", "de"], "timeout": 0.5}))[-1], 504)


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_one_of_several_prompts_runs_out_of_time(server: Served, monkeypatch: pytest.MonkeyPatch, max_tokens: int):
    """Echo, where even the prompt's log-probabilities are missing."""
    advance = server.engine._advance
    late = lambda running: running.request.request_id.endswith("-1")  # noqa: E731
    monkeypatch.setattr(server.engine, "_advance", lambda running: (server.engine._time_out if late(running) else advance)(running))
    body = {"model": MODEL_NAME, "prompt": ["abc", "de"], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    status, whole = await server.post(COMPLETIONS, body)
    assert status == 200
    first, second = whole["choices"]
    assert (first["text"], first["finish_reason"]) == ("abc" + "abca"[:max_tokens], "length")
    assert (second["text"], second["finish_reason"]) == ("de", "timeout")
    assert second["logprobs"]["token_logprobs"] == [None, None]
    choices = [event["choices"][0] for event in (await server.events(COMPLETIONS, body))[:-1]]
    assert [choice["finish_reason"] for choice in choices if choice["index"] == 1] == [None, "timeout"]


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (2, 2), (400, 5 + 1)])
async def test_cached_tokens_are_summed_over_prompts(serve: Serve, cached: int, told: int):
    server = await serve(FakeEngine(num_cached_tokens=cached))
    prompts: list[str] | str = ["abcdef", "gh"] if cached == 400 else "abcdef"
    body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 3, "n": 2}
    _, whole = await server.post(COMPLETIONS, body)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": told}
    events = await server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert events[-2]["usage"] == whole["usage"]
    events = await server.events(COMPLETIONS, body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    assert events[-3]["usage"]["prompt_tokens_details"] == {"cached_tokens": told}


async def test_cached_tokens_of_a_chat(serve: Serve):
    server = await serve(FakeEngine(num_cached_tokens=3))
    answer = await (await server.openai()).chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
