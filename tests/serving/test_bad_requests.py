from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from tests.serving.conftest import Serve, Served
from tests.serving.fake_engine import MODEL_NAME

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BASE = {
    CHAT: {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 2},
    COMPLETIONS: {"model": MODEL_NAME, "prompt": "hi", "max_tokens": 2},
}
LEAKS = ("Traceback", 'File "', "site-packages", "object at 0x", "/work", "serving/")


def assert_error(status: int, body: Any, *allowed: int, param: str | None = None) -> None:
    """OpenAI's shape, the right status, and nothing of our insides."""
    assert status in allowed, (status, body)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    types = {401: "authentication_error", 429: "rate_limit_error"}
    assert body["error"]["type"] == types.get(status, "server_error" if status >= 500 else "invalid_request_error")
    assert not any(leak in body["error"]["message"] for leak in LEAKS)
    assert len(body["error"]["message"]) < 1500
    if param is not None:
        assert body["error"]["param"] == param


async def assert_unharmed(server: Served) -> None:
    status, body = await server.complete("abc")
    assert (status, body["choices"][0]["text"]) == (200, "abca")


async def test_wrong_shapes(server: Served):
    for path, base in BASE.items():
        for root in ([], 5, None, "x", True, [{}], {}):
            assert_error(*await server.post(path, root), 400)
        for raw in (b"", b"{", b"nope", b'{"model":', b"\x00" * 20, b"\xef\xbb\xbf{}", b"{} {}", b'{"a": 01}', b'{"model": "\x01"}'):
            assert_error(*await server.post(path, raw), 400)
        for field in (
            "max_tokens", "temperature", "top_p", "min_p", "top_k", "n", "stop", "stream", "seed", "logprobs", "presence_penalty",
            "frequency_penalty", "repetition_penalty", "stream_options", "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos",
            "prompt_logprobs", "bad_words", "allowed_token_ids", "skip_special_tokens", "priority", "request_id", "return_token_ids",
        ):  # fmt: skip
            for wrong in ({"a": 1}, [[]], "zz é" if field != "stop" else 3.5, "\ud83d" if field != "stop" else 7):
                if (field, wrong) != ("bad_words", "zz é"):
                    assert_error(*await server.post(path, {**base, field: wrong}), 400)
    await assert_unharmed(server)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, 0, 1.5, "5", True, -(2**40)]),
        ("temperature", [-0.1, 101, "1", True, 10**40]),
        ("top_p", [0, -1, 1.1]),
        ("min_p", [-0.1, 1.1]),
        ("top_k", [-2, 1.5, True, "5", [1], 2**64]),
        ("n", [0, -1, 129, 10**9, 1.5]),
        ("seed", [-1.5, "x", 2**70, -(2**64)]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, -2.1]),
        ("repetition_penalty", [0, -1, 101]),
        ("min_tokens", [-1, 3]),
        ("stop", [[""], "", 5, [None], ["a"] * 500, ["x" * 2000], [None] * 100_000]),
        ("stop_token_ids", [[-1], [1.5], ["a"], 5, [True]]),
        ("bad_words", [[""], 5, ["a"] * 129]),
        ("allowed_token_ids", [[], [-1], "a"]),
        ("logit_bias", [{"257": 1}, {"191222": -100}, {"-1": 5}, {"1.5": 1}, {"abc": 1}, {"05": 1}, {"٣": 1}, {str(10**30): 1}, [1, 2]]),
        ("prompt_logprobs", [-1, 21]),
        ("priority", [2**40, -(2**40), 0.5]),
        ("request_id", ["", "a b", "x" * 129, 5]),
        ("response_format", [{"type": "json_object"}, {"type": "json_schema"}, "text", {}]),
        ("tools", [[], [{"type": "function"}]]),
        ("reasoning_effort", ["high"]),
        ("chat_template", ["{{ x }}"]),
        ("use_beam_search", [True]),
        ("stream_options", [{"include_usage": True}]),
        ("tempreature", [1]),
    ],
)
async def test_wrong_values_name_their_field(server: Served, path: str, field: str, values: list[Any]):
    for value in values:
        assert_error(*await server.post(path, {**BASE[path], field: value}), 400, param=field)
    assert server.engine.requests_seen == []


@pytest.mark.parametrize("value", [None, "5", 1000, True, float("1e308")])
async def test_a_wrong_bias_names_its_token(server: Served, value: Any):
    status, body = await server.complete(logit_bias={"5": value})
    assert_error(status, body, 400)
    assert "logit_bias[5]" in body["error"]["message"]


async def test_all_wrong_bias_keys_are_named(server: Served):
    _, body = await server.complete(logit_bias={"7": 1, "999": 1, "x": 1, "-4": 1})
    assert all(repr(key) in body["error"]["message"] for key in ("999", "x", "-4"))
    assert "'7'" not in body["error"]["message"]


async def test_more_unknown_names_are_all_told(server: Served):
    _, body = await server.complete(colour="red", shape="round")
    assert body["error"]["message"] == "unknown fields: colour, shape"


async def test_rules_over_several_fields(server: Served):
    for fields in ({"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 0}):
        assert_error(*await server.chat(**fields), 400, param="top_logprobs")
    for count in (21, 1_000_000, -1):
        assert_error(*await server.chat(logprobs=True, top_logprobs=count), 400, param="top_logprobs")
    for count in (21, -1):
        assert_error(*await server.complete(logprobs=count), 400, param="logprobs")
    assert_error(*await server.complete(prompt_logprobs=1, stream=True), 400, param="prompt_logprobs")
    assert_error(*await server.complete(stream=True, stream_options={"include_usage": 1}), 400, param="stream_options")
    assert_error(*await server.complete(best_of=3), 400, param="best_of")
    assert_error(*await server.complete(best_of=10**9), 400, param="best_of")
    assert_error(*await server.chat(max_completion_tokens=0), 400, param="max_completion_tokens")
    assert_error(*await server.chat(tool_choice="auto"), 400, param="tool_choice")
    assert_error(*await server.chat(echo=True), 400, param="echo")
    assert_error(*await server.complete(max_tokens=0), 400, param="max_tokens")


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hi", [5], [{}], [{"role": "user"}], [{"role": "zz", "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "zz"}]}], [{"role": "user", "content": []}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": ["user"], "content": "x"}], [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x", "mood": "good"}], [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        [{"role": "user", "content": "x"}] * 5000,
    ],
)  # fmt: skip
async def test_wrong_messages(server: Served, messages: Any):
    status, body = await server.post(CHAT, {"model": MODEL_NAME, "messages": messages, "max_tokens": 2})
    assert_error(status, body, 400)
    assert body["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    "prompt",
    [
        "", [], None, [[]], [-1], [257], [10**9], [10**40], ["a", 1], [1, "a"], ["a", [1]], {"x": 1}, [1.5], [True], [""], ["a", ""],
        5, [[1], []], [[1], [1.0]], ["hi"] * 1025, "x" * 600, [97] * 512,
    ],
)  # fmt: skip
async def test_wrong_prompts(server: Served, prompt: Any):
    assert_error(*await server.complete(prompt), 400, param="prompt")
    assert server.engine.requests_seen == []


async def test_a_prompt_that_is_too_long_has_openais_code(server: Served):
    _, body = await server.complete([97] * 512)
    assert body["error"]["code"] == "context_length_exceeded"


async def test_one_wrong_prompt_runs_none_to_the_end(server: Served):
    assert_error(*await server.complete(["ok", "x" * 600], max_tokens=400), 400)
    await assert_unharmed(server)
    assert server.thread.snapshot().num_running == 0


async def test_choices_are_bounded(server: Served):
    assert_error(*await server.complete(["a"] * 1024, n=128), 400, param="n")


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1e400", "-2147483649", "0." + "1" * 5000]
)
async def test_numbers_that_are_none(server: Served, value: str):
    for field in (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens", "n", "top_k", "logprobs",
    ):  # fmt: skip
        raw = f'{{"model": "{MODEL_NAME}", "prompt": "hi", "max_tokens": 2, "{field}": {value}}}'.encode()
        raw = raw.replace(b'"max_tokens": 2, "max_tokens"', b'"max_tokens"')
        assert_error(*await server.post(COMPLETIONS, raw), 400)


async def test_tiny_numbers_are_zero(server: Served):
    for value in (b"-0.0", b"1e-320", b"0"):
        raw = b'{"model": "%s", "prompt": "abc", "max_tokens": 2, "temperature": %s}' % (MODEL_NAME.encode(), value)
        status, _ = await server.post(COMPLETIONS, raw)
        assert status == 200


async def test_duplicate_keys(server: Served):
    raw = b'{"model": "%s", "prompt": "hi", "max_tokens": 2, "max_tokens": 3}' % MODEL_NAME.encode()
    status, body = await server.post(COMPLETIONS, raw)
    assert_error(status, body, 400)
    assert "'max_tokens'" in body["error"]["message"]


async def test_unknown_model(server: Served):
    for path, base in BASE.items():
        assert_error(*await server.post(path, {**base, "model": "no-such"}), 404, param="model")
        assert_error(*await server.post(path, {**base, "model": "../../etc/passwd"}), 404)
        assert_error(*await server.post(path, {**base, "model": None}), 400, param="model")
    status, text = await server.get("/v1/models/no-such")
    assert_error(status, json.loads(text), 404)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_bodies(serve: Serve, encoding: str):
    server = await serve(max_body_bytes=1 << 20)
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    headers = {"Content-Encoding": encoding}
    status, _ = await server.post(COMPLETIONS, pack(json.dumps(BASE[COMPLETIONS]).encode()), headers=headers)
    assert status == 200
    bomb = pack(b'{"prompt": "' + b"a" * (32 << 20) + b'"}')
    assert len(bomb) < 1 << 16
    assert_error(*await server.post(COMPLETIONS, bomb, headers=headers), 413)
    assert_error(*await server.post(COMPLETIONS, b"junk" * 10, headers=headers), 400)
    assert_error(*await server.post(COMPLETIONS, pack(json.dumps(BASE[COMPLETIONS]).encode())[:-2], headers=headers), 400)
    await assert_unharmed(server)


async def test_size_limit_of_bodies(serve: Serve):
    server = await serve(max_body_bytes=2000)
    assert_error(*await server.complete("x" * 3000), 413)
    status, body = await server.complete("x" * 1800)
    assert status == 400, "within the limit, but longer than the context"
    assert body["error"]["code"] == "context_length_exceeded"

    async def chunks():
        for _ in range(3000):
            yield b"a"

    async with server.session.post(server.url + COMPLETIONS, data=chunks(), headers={"Content-Type": "application/json"}) as response:
        assert_error(response.status, await response.json(), 413)


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/json; charset=foo",
        "application/json; charset=utf-7",
        "application/jsonx",
        "",
    ],
)
async def test_media_types(server: Served, content_type: str):
    assert_error(*await server.post(COMPLETIONS, BASE[COMPLETIONS], headers={"Content-Type": content_type}), 415)


async def test_media_types_that_are_right(server: Served):
    for content_type in ("application/json", "application/json; charset=utf-8", 'Application/JSON; charset="UTF-8"'):
        status, _ = await server.post(COMPLETIONS, BASE[COMPLETIONS], headers={"Content-Type": content_type})
        assert status == 200


async def test_unknown_compression(server: Served):
    for encoding in ("zz", "br", "zstd"):
        assert_error(*await server.post(COMPLETIONS, BASE[COMPLETIONS], headers={"Content-Encoding": encoding}), 415, 400)


@pytest.mark.parametrize("depth", [65, 1000, 100_000])
async def test_depth(server: Served, depth: int):
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        raw = b'{"model":"x","x":' + opening * depth + b"1" + closing * depth + b"}"
        status, body = await server.post(COMPLETIONS, raw)
        assert_error(status, body, 400)
        assert "deep" in body["error"]["message"]


async def test_brackets_in_strings_are_not_depth(server: Served):
    status, _ = await server.complete('[{"' * 60 + "\\" * 3 + "[" * 100)
    assert status == 200


async def test_text_that_is_not_unicode(server: Served):
    raw = b'{"model":"%s","max_tokens":1,"prompt":"%s"}'
    for bad in (b"\xff\xfe\x80", b"\xed\xa0\x80", b"\\ud83d", b"\\udc00\\ud83d"):
        assert_error(*await server.post(COMPLETIONS, raw % (MODEL_NAME.encode(), bad)), 400)
    status, _ = await server.post(COMPLETIONS, raw % (MODEL_NAME.encode(), b"\\ud83d\\ude00"))
    assert status == 200


async def test_unclosed_strings_take_linear_time():
    from serving.json_text import JsonError, parse_json

    # Searched again from each of its quotes, this text would keep the test busy for many minutes.
    with pytest.raises(JsonError):
        parse_json('"' + '\\"' * 1_000_000)


async def test_unknown_routes_and_methods(server: Served):
    status, text = await server.get("/v1/nothing")
    assert_error(status, json.loads(text), 404)
    status, text = await server.get(COMPLETIONS)
    assert_error(status, json.loads(text), 405)
    async with server.session.options(server.url + COMPLETIONS) as response:
        assert response.headers["Allow"] == "POST"
        assert_error(response.status, await response.json(), 405)


async def test_an_error_nobody_foresaw_says_nothing(server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret at /root/place 0x7f0000000000")

    monkeypatch.setattr(server.engine.tokenizer, "encode", explode)
    status, body = await server.complete()
    assert_error(status, body, 500)
    assert "secret" not in json.dumps(body)
    assert "secret" in caplog.text
