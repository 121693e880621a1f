from __future__ import annotations

import pytest

from tests.serving.conftest import Served
from tests.serving.fake_engine import EOS, MODEL_NAME


async def test_openai_client_gets_a_completion(server: Served):
    answer = await (await server.openai()).completions.create(model=MODEL_NAME, prompt="hello", max_tokens=7)
    assert answer.object == "text_completion"
    assert answer.model == MODEL_NAME
    assert [choice.text for choice in answer.choices] == ["hellohe"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
    }
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: Served):
    _, body = await server.complete(["abc", "xyz"], n=2, max_tokens=3)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "abc"), (1, "bca"), (2, "xyz"), (3, "yzx")]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(server: Served, prompt: object):
    status, body = await server.complete(prompt)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == ["abab"]


async def test_streams_of_several_prompts_give_the_whole_answers(server: Served):
    body = {"model": MODEL_NAME, "prompt": ["abc", "xyz"], "n": 2, "max_tokens": 5}
    events = await server.events("/v1/completions", body)
    texts = ["", "", "", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abcab", "bcabc", "xyzxy", "yzxyz"]
    assert events[-1] == "[DONE]"


async def test_the_default_of_max_tokens_is_16_and_null_is_the_default(server: Served):
    for fields in ({}, {"max_tokens": None}):
        _, body = await server.post("/v1/completions", {"model": MODEL_NAME, "prompt": "abc", **fields})
        assert body["usage"]["completion_tokens"] == 16


async def test_max_tokens_beyond_the_context_means_to_its_end(server: Served):
    _, body = await server.complete("abc", max_tokens=2**31 - 1)
    assert body["usage"]["total_tokens"] == 512
    assert server.engine.requests_seen[0].params.max_tokens == 512
    assert body["choices"][0]["finish_reason"] == "length"


async def test_the_end_of_sequence_token_stops(server: Served):
    _, body = await server.complete(f"ab{EOS}cd", max_tokens=9)
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None


async def test_a_stop_string_is_named(server: Served):
    _, body = await server.complete("abcdef", max_tokens=9, stop="d")
    assert (body["choices"][0]["text"], body["choices"][0]["stop_reason"]) == ("abc", "d")


async def test_parameters_reach_the_engine(server: Served):
    await server.complete(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, repetition_penalty=1.1, presence_penalty=-1, frequency_penalty=0.5,
        logit_bias={"5": 1.5, "6": -100}, stop=["x", "y"], stop_token_ids=[3], min_tokens=2, ignore_eos=True, bad_words=["bad"],
        allowed_token_ids=[1, 2], skip_special_tokens=False, include_stop_str_in_output=True, n=2, priority=-3, request_id="mine",
    )  # fmt: skip
    request = server.engine.requests_seen[0]
    params = request.params
    assert (request.request_id, request.priority) == ("cmpl-mine", -3)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 3, 0.9, 0.1, 7)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, -1, 0.5)
    assert params.logit_bias == {5: 1.5, 6: -100}
    assert (params.stop, params.stop_token_ids, params.min_tokens, params.max_tokens) == (("x", "y"), (3,), 2, 4)
    assert (params.bad_words, params.allowed_token_ids, params.n) == (("bad",), (1, 2), 2)
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (True, False, True)


async def test_fields_without_effect_are_taken(server: Served):
    status, _ = await server.complete(user="me", store=True, metadata={"a": "b"}, service_tier="auto", tools=None, suffix=None, best_of=1)
    assert status == 200


async def test_return_token_ids(server: Served):
    _, body = await server.complete("abc", return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [97, 98, 99, 97]
    assert body["choices"][0]["prompt_token_ids"] == [97, 98, 99]


async def test_legacy_logprobs_shape(server: Served):
    answer = await (await server.openai()).completions.create(model=MODEL_NAME, prompt="abc", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}]
    assert logprobs.text_offset == [0, 1, 2]


async def test_logprobs_zero_gives_the_chosen_token_alone(server: Served):
    _, body = await server.complete("abc", logprobs=0, max_tokens=1)
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]


async def test_pieces_of_characters_have_names_and_offsets_of_their_own(server: Served):
    _, body = await server.complete("é!", max_tokens=3, logprobs=1)
    logprobs = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == "é!"
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 1, 1]


async def test_streamed_logprobs_join_to_the_whole_ones(server: Served):
    body = {"model": MODEL_NAME, "prompt": "aé", "max_tokens": 6, "logprobs": 1}
    _, whole = await server.post("/v1/completions", body)
    joined: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in (await server.events("/v1/completions", body))[:-1]:
        for name, values in joined.items():
            values.extend(event["choices"][0]["logprobs"][name])
    assert joined == whole["choices"][0]["logprobs"]


async def test_echo_puts_the_prompt_in_front(server: Served):
    _, body = await server.complete("abc", echo=True)
    assert body["choices"][0]["text"] == "abcabca"
    _, body = await server.complete([97, 98], echo=True)
    assert body["choices"][0]["text"] == "ababab"
    events = await server.events("/v1/completions", {"model": MODEL_NAME, "prompt": "abc", "max_tokens": 4, "echo": True})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abcabca"


@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_with_logprobs_covers_prompt_and_answer(server: Served, max_tokens: int):
    body = {"model": MODEL_NAME, "prompt": "abc", "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    _, whole = await server.post("/v1/completions", body)
    choice = whole["choices"][0]
    assert choice["text"] == "abc" + "ab"[:max_tokens]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == list("abc" + "ab"[:max_tokens])
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5][: 3 + max_tokens]
    assert choice["logprobs"]["text_offset"] == list(range(3 + max_tokens))
    assert whole["usage"]["completion_tokens"] == max_tokens
    events = (await server.events("/v1/completions", body))[:-1]
    assert [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


async def test_prompt_logprobs(server: Served):
    _, body = await server.complete("ab", prompt_logprobs=1)
    assert body["choices"][0]["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
