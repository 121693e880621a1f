"""The real engine around a model whose answers are arithmetic: scheduling, sampling and text, end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine import Engine
from jaxinfer.errors import RequestError
from jaxinfer.request import FinishReason, GenerationRequest, RequestId, RequestOutput, SamplingParams
from tests.engine.lookup_model import EOS, VOCAB_SIZE, check_nothing_is_left, continuation, make_engine, next_token

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["on", "off"], ids=["async", "one step at a time"])
def shared_engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(async_scheduling=request.param)


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The engine of this module; whatever a test did, nothing is left behind and nothing was compiled."""
    yield shared_engine
    check_nothing_is_left(shared_engine)


def run(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[RequestOutput]:
    """All at once, to their ends; conservation is checked after every step."""
    outputs = {}
    for index, (prompt, params) in enumerate(requests):
        request = GenerationRequest(request_id=RequestId(f"r{index}"), prompt_token_ids=tuple(prompt), params=params)
        engine.add_request(request)
        outputs[request.request_id] = RequestOutput.empty(request.request_id, None, prompt, params.n)
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id].add(delta)
        engine.scheduler.check()
    assert all(output.is_finished for output in outputs.values())
    return list(outputs.values())


def one(engine: Engine, prompt: Sequence[int], **params: Any) -> Any:
    """The first completion of a single request."""
    return run(engine, [(prompt, SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | params))])[0].outputs[0]


PROMPTS = [[(k * 31 + i * 7) % 250 for i in range(1 + (k * 13) % 60)] for k in range(20)]


def test_a_batch_of_unequal_prompts(engine: Engine) -> None:
    """Bug: a token reads another sequence's KV, or a chunk starts at a wrong position."""
    for prompt, output in zip(PROMPTS, run(engine, [(prompt, GREEDY) for prompt in PROMPTS]), strict=True):
        assert output.outputs[0].token_ids == continuation(prompt, 12)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_preempted_requests_give_the_same_tokens() -> None:
    """A pool for two sequences, eight at once: recomputed prompts and outputs must lie where they lay."""
    engine = make_engine(num_blocks=24, max_num_batched_tokens=16)
    prompts = [prompt[:20] for prompt in PROMPTS]
    params = GREEDY.replace(max_tokens=30)
    for prompt, output in zip(prompts, run(engine, [(prompt, params) for prompt in prompts]), strict=True):
        assert output.outputs[0].token_ids == continuation(prompt, 30)
    assert engine.snapshot().num_preemptions > 0


def test_alone_and_chunked(engine: Engine) -> None:
    """A prompt three times as long as a step."""
    prompt = list(range(100))
    assert one(engine, prompt, max_tokens=20).token_ids == continuation(prompt, 20)


def test_the_context_ends_a_sequence(engine: Engine) -> None:
    prompt = list(range(120))
    output = one(engine, prompt, max_tokens=None)
    assert output.token_ids == continuation(prompt, 8)
    assert output.finish_reason is FinishReason.LENGTH


def prompt_before(target: int) -> list[int]:
    """A prompt whose next token is `target`."""
    return next([a, b] for a in range(250) for b in range(250) if next_token([a, b]) == target)


def test_end_of_sequence(engine: Engine) -> None:
    """It counts as a token, shows no text, and can be ignored or put off."""
    prompt = prompt_before(EOS)
    output = one(engine, prompt, ignore_eos=False)
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([EOS], "", FinishReason.STOP, None)
    assert one(engine, prompt, ignore_eos=True, max_tokens=3).token_ids == continuation(prompt, 3)
    held_off = one(engine, prompt, ignore_eos=False, min_tokens=4, max_tokens=6).token_ids
    assert EOS not in held_off[:4]
    assert held_off[0] == EOS - 1, "the second best token takes its place"


def test_stop_token_ids(engine: Engine) -> None:
    prompt = [5, 6, 7]
    tokens = continuation(prompt, 10)
    output = one(engine, prompt, stop_token_ids=[tokens[4]], max_tokens=10)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (tokens[:5], FinishReason.STOP, tokens[4])


def printable_prompt(count: int) -> list[int]:
    """A prompt whose continuation begins with `count` ASCII bytes."""
    return next([a, b] for a in range(250) for b in range(250) if all(32 <= token < 127 for token in continuation([a, b], count)))


def test_stop_strings_cut_text_and_tokens(engine: Engine) -> None:
    prompt = printable_prompt(3)
    text = bytes(continuation(prompt, 3)).decode()
    output = one(engine, prompt, stop=[text[1:3]], max_tokens=12)
    assert (output.text, output.token_ids) == (text[:1], continuation(prompt, 3))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, text[1:3])
    assert one(engine, prompt, stop=[text[1:3]], include_stop_str_in_output=True, max_tokens=12).text == text


def test_text_is_the_decoded_tokens(engine: Engine) -> None:
    """Random bytes are rarely whole characters: nothing may be lost or come twice."""
    for prompt in PROMPTS[:6]:
        output = one(engine, prompt, max_tokens=40)
        assert output.text == engine.tokenizer.decode(output.token_ids)


def test_n_answers_with_their_own_seeds(engine: Engine) -> None:
    output = run(engine, [([9, 8, 7], SamplingParams(n=3, temperature=5.0, seed=4, max_tokens=10, ignore_eos=True))])[0]
    answers = [tuple(answer.token_ids) for answer in output.outputs]
    assert len(set(answers)) == 3 and all(len(answer) == 10 for answer in answers)


def test_a_seed_holds_in_any_company(engine: Engine) -> None:
    """Same tokens alone, twice in a batch, beside unseeded and greedy neighbours; any bit of the seed counts."""
    sampled = SamplingParams(temperature=8.0, seed=2**63 + 5, max_tokens=10, ignore_eos=True)
    alone = run(engine, [([1, 2, 3], sampled)])[0].outputs[0].token_ids
    neighbours = [(prompt, GREEDY if index % 2 else sampled.replace(seed=None)) for index, prompt in enumerate(PROMPTS[:6])]
    together = run(engine, [*neighbours[:3], ([1, 2, 3], sampled), *neighbours[3:], ([1, 2, 3], sampled)])
    assert together[3].outputs[0].token_ids == alone == together[7].outputs[0].token_ids
    assert together[0].outputs[0].token_ids != together[2].outputs[0].token_ids
    assert run(engine, [([1, 2, 3], sampled.replace(seed=5))])[0].outputs[0].token_ids != alone


def test_padding_rows_are_never_chosen(engine: Engine) -> None:
    """They hold the largest logits by far."""
    hot = SamplingParams(temperature=50.0, max_tokens=40, ignore_eos=True, logprobs=20)
    for output in run(engine, [(prompt, hot) for prompt in PROMPTS[:8]]):
        assert max(output.outputs[0].token_ids) < VOCAB_SIZE
        assert all(top.token_id < VOCAB_SIZE for position in output.outputs[0].logprobs for top in position.top)


def expected_logprobs(tokens: Sequence[int]) -> np.ndarray:
    """log softmax of the model's logits after `tokens`, float64."""
    logits = -np.abs(np.arange(VOCAB_SIZE) - next_token(tokens)).astype(np.float64)
    return logits - math.log(np.exp(logits).sum())


def test_logprobs(engine: Engine) -> None:
    """One entry per token, for the tokens really chosen, from the model's own distribution."""
    prompt = [3, 1, 4]
    output = one(engine, prompt, temperature=30.0, seed=1, logprobs=5, max_tokens=6)
    assert len(output.logprobs) == 6
    for index, (token, position) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        expected = expected_logprobs([*prompt, *output.token_ids[:index]])
        assert position.chosen.token_id == token
        assert position.chosen.logprob == pytest.approx(expected[token], abs=1e-4)
        assert position.chosen.rank == 1 + (expected > expected[token] + 1e-9).sum() + (np.isclose(expected, expected[token])[:token]).sum()
        assert [top.logprob for top in position.top] == pytest.approx(sorted(expected, reverse=True)[:5], abs=1e-4)


def test_prompt_logprobs(engine: Engine) -> None:
    """Every prompt token but the first, across chunks and beside other requests."""
    prompt = PROMPTS[4] + list(range(40))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
    output = run(engine, [(PROMPTS[0], GREEDY), (prompt, params), (PROMPTS[1], GREEDY)])[1]
    assert output.outputs[0].token_ids == continuation(prompt, 4)
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    for index in range(1, len(prompt)):
        position = output.prompt_logprobs[index]
        assert position.chosen.token_id == prompt[index]
        assert position.chosen.logprob == pytest.approx(expected_logprobs(prompt[:index])[prompt[index]], abs=1e-3)
        assert position.top[0].token_id == next_token(prompt[:index])


def test_logit_bias_allowed_ids_and_bad_words(engine: Engine) -> None:
    prompt = printable_prompt(2)
    first, second = continuation(prompt, 2)
    assert one(engine, prompt, logit_bias={first: -100}, max_tokens=1).token_ids[0] != first
    assert one(engine, prompt, logit_bias={77: 100, 78: 50}, max_tokens=3).token_ids[0] == (77 if abs(first - 77) < 100 else first)
    assert set(one(engine, prompt, allowed_token_ids=[40, 41], max_tokens=8).token_ids) <= {40, 41}
    assert one(engine, prompt, bad_words=[chr(first)], max_tokens=1).token_ids[0] != first
    both = one(engine, prompt, bad_words=[chr(first) + chr(second)], max_tokens=2).token_ids
    assert both[0] == first and both[1] != second, "the first of a two-token word alone is allowed"


def test_penalties_see_prompt_and_output(engine: Engine) -> None:
    """A huge presence penalty cannot matter to logits of this size, so the frequency one is measured in steps of logits."""
    prompt = [9, 9, 9]
    free = one(engine, prompt, max_tokens=30)
    repeated = [token for index, token in enumerate(free.token_ids) if token in free.token_ids[:index]]
    assert repeated, "the arithmetic does repeat itself"
    tokens: list[int] = []
    for _ in range(30):
        scores = -np.abs(np.arange(VOCAB_SIZE) - next_token([*prompt, *tokens])).astype(np.float64)
        counts = np.bincount(tokens, minlength=VOCAB_SIZE)
        scores -= 2.0 * counts + 1.5 * (counts > 0)
        tokens.append(int(scores.argmax()))
    assert one(engine, prompt, max_tokens=30, frequency_penalty=2.0, presence_penalty=1.5).token_ids == tokens
    assert tokens != free.token_ids
    # repetition_penalty multiplies negative logits; the best one here is 0, which it leaves alone.
    assert one(engine, prompt, max_tokens=10, repetition_penalty=1.5).token_ids == free.token_ids[:10]


def test_penalties_survive_preemption() -> None:
    """Counts belong to the tokens fed, so recomputation counts them anew, once."""
    params = GREEDY.replace(max_tokens=30, frequency_penalty=2.0, allowed_token_ids=list(range(40, 48)))
    roomy, tight = make_engine(num_blocks=200), make_engine(num_blocks=24)
    prompts = [prompt[:20] for prompt in PROMPTS[:8]]
    expected = [output.outputs[0].token_ids for prompt in prompts for output in run(roomy, [(prompt, params)])]
    got = [output.outputs[0].token_ids for output in run(tight, [(prompt, params) for prompt in prompts])]
    assert tight.snapshot().num_preemptions > 0
    assert got == expected


def test_abort_at_every_step(engine: Engine) -> None:
    """Queued, between chunks, while decoding: blocks come back and the neighbour does not notice."""
    for num_steps in range(6):
        for index, prompt in enumerate((list(range(90)), PROMPTS[3])):
            engine.add_request(GenerationRequest(request_id=RequestId(f"a{index}"), prompt_token_ids=tuple(prompt), params=GREEDY))
        output = RequestOutput.empty(RequestId("a1"), None, PROMPTS[3], 1)
        for step in range(40):
            if step == num_steps:
                engine.abort(RequestId("a0"))
            for delta in engine.step():
                if delta.request_id == "a1":
                    output.add(delta)
            engine.scheduler.check()
        assert output.outputs[0].token_ids == continuation(PROMPTS[3], 12)
        assert not engine.has_work


def test_what_can_never_run_is_refused_and_harms_nobody(engine: Engine) -> None:
    bad: list[tuple[Sequence[int], dict[str, Any], str]] = [
        ([], {}, "at least 1 token"),
        ([VOCAB_SIZE], {}, "from 0 to 256"),
        ([-1], {}, "from 0 to 256"),
        (list(range(128)), {}, "at most 127"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": [257]}, "allowed_token_ids"),
        ([1], {"stop_token_ids": [9999]}, "stop_token_ids"),
    ]
    for prompt, params, words in bad:
        request = GenerationRequest(request_id=RequestId("bad"), prompt_token_ids=tuple(prompt), params=SamplingParams(**params))
        with pytest.raises(RequestError, match=words):
            engine.add_request(request)
    request = GenerationRequest(request_id=RequestId("twice"), prompt_token_ids=(1, 2), params=GREEDY)
    engine.add_request(request)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request(request)
    engine.abort(RequestId("twice"))
    assert one(engine, [1, 2, 3]).token_ids == continuation([1, 2, 3], 16)


def test_timings_and_counters(engine: Engine) -> None:
    before = engine.snapshot()
    output = run(engine, [([1, 2, 3], GREEDY)])[0]
    timings = output.timings
    assert timings.arrival <= timings.first_scheduled <= timings.first_token <= timings.finished
    after = engine.snapshot()
    assert after.num_generation_tokens - before.num_generation_tokens == 12
    assert after.num_prompt_tokens - before.num_prompt_tokens == 3
    assert after.num_steps - before.num_steps == 12
    assert after.finished_by_reason["length"] - before.finished_by_reason.get("length", 0) == 1


def test_logits_for_any_chunk_size(engine: Engine) -> None:
    tokens = list(range(50))
    for chunk_size in (None, 1, 7, 32):
        logits = engine.logits_for(tokens, chunk_size)[:, :VOCAB_SIZE]
        assert logits.argmax(axis=1).tolist() == [next_token(tokens[: index + 1]) for index in range(50)]
    with pytest.raises(RequestError, match="1 to 128"):
        engine.logits_for([])
