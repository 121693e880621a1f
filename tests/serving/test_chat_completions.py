from __future__ import annotations

import json

import pytest

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import MODEL_NAME, FakeEngine


async def test_openai_client_gets_a_message(server: Served):
    answer = await (await server.openai()).chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], max_completion_tokens=8
    )
    assert answer.object == "chat.completion"
    # The fake engine repeats the prompt, which is what the template made of the messages.
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "system:s")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len("system:s\nuser:hi\nassistant:")


async def test_openai_client_streams_a_message(server: Served):
    stream = await (await server.openai()).chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "héllo"}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "user:héllo\n"
    assert chunks[-1].usage.completion_tokens == 12


async def test_an_answer_may_fill_the_context(server: Served):
    for fields in ({"max_tokens": None}, {}):
        messages = [{"role": "user", "content": "hi"}]
        _, body = await server.post("/v1/chat/completions", {"model": MODEL_NAME, "messages": messages, **fields})
        assert body["usage"]["total_tokens"] == 512


async def test_text_parts_and_the_developer_role(server: Served):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None},
        {"role": "user", "content": ""},
    ]
    _, body = await server.post("/v1/chat/completions", {"model": MODEL_NAME, "messages": messages, "max_tokens": 200})
    assert body["choices"][0]["message"]["content"].startswith("system:be brief\nuser:one\ntwo\nassistant:ok\nuser:\nassistant:")


async def test_chat_logprobs_shape(server: Served):
    answer = await (await server.openai()).chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "x"}], max_tokens=2, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [(item.token, item.logprob, item.bytes) for item in content] == [("u", -0.5, [117]), ("s", -0.5, [115])]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("u", -0.5), ("v", -1.5)]


async def test_chat_logprobs_without_top_logprobs(server: Served):
    _, body = await server.chat(logprobs=True)
    assert [item["top_logprobs"] for item in body["choices"][0]["logprobs"]["content"]] == [[], [], [], []]
    _, body = await server.chat()
    assert body["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stop", [None, "r"])
async def test_events_have_openais_shape(server: Served, path: str, options: dict | None, n: int, stop: str | None):
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "user"}
    body = {"model": MODEL_NAME, "max_tokens": 9, "n": n, **prompt} | ({"stop": stop} if stop else {})
    events = await server.events(path, body if options is None else body | {"stream_options": options})
    assert events.pop() == "[DONE]"
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    for index in range(n):
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["index"] == index]
        assert reasons[-1] == ("stop" if stop else "length")
        assert set(reasons[:-1]) <= {None}
    with_usage = [event for event in events if event.get("usage")]
    if options == {"include_usage": True}:
        _, whole = await server.post(path, body)
        assert with_usage == [events[-1]]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
    else:
        assert with_usage == []
    if "chat" in path:
        first = {index: next(e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index) for index in range(n)}
        assert all(choice["delta"]["role"] == "assistant" for choice in first.values())


async def test_running_usage(serve: Serve):
    server = await serve(FakeEngine(step_seconds=0.02))
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events("/v1/completions", {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 3, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 3]


async def test_line_ends_of_unicode_do_not_cut_events(server: Served):
    text = "a\u2028b\u2029c\x85d"
    body = {"model": MODEL_NAME, "prompt": text, "max_tokens": len(text.encode())}
    async with server.session.post(f"{server.url}/v1/completions", json=body | {"stream": True}) as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == text
