"""A step ahead: what happens to requests, blocks and texts while a step is in flight."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.engine import Engine
from jaxinfer.errors import RequestError
from jaxinfer.request import FinishReason, GenerationRequest, RequestDelta, RequestId, RequestOutput, SamplingParams
from jaxinfer.step_trace import StepTimes, StepTrace
from tests.engine.lookup_model import VOCAB_SIZE, check_nothing_is_left, continuation, make_engine, next_token
from tests.engine.test_engine import GREEDY, PROMPTS, expected_logprobs, printable_prompt, prompt_before, run


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def built() -> Callable[..., Engine]:
    """Engines by their options, each made once."""
    return functools.cache(make_engine)


@pytest.fixture(scope="module", params=["on", "off"], ids=["async", "one step at a time"])
def shared_engine(request: pytest.FixtureRequest, clock: Clock) -> Engine:
    return make_engine(async_scheduling=request.param, clock=clock, request_timeout=1000.0)


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Whatever a test did: nothing runs, every block is back, and nothing was compiled."""
    yield shared_engine
    check_nothing_is_left(shared_engine)


def add(engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **fields: Any) -> RequestOutput:
    """Queue a request; returns where its deltas go."""
    engine.add_request(GenerationRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), params=params, **fields))
    return RequestOutput.empty(RequestId(name), None, prompt, params.n)


def drive(engine: Engine, *outputs: RequestOutput, until: int | None = None) -> list[RequestDelta]:
    """Step until these have ended or, with `until`, the first has as many tokens; returns all deltas."""
    by_name = {output.request_id: output for output in outputs}
    deltas = []
    while not all(output.is_finished for output in outputs) if until is None else len(outputs[0].outputs[0].token_ids) < until:
        for delta in engine.step():
            deltas.append(delta)
            if delta.request_id in by_name:
                by_name[delta.request_id].add(delta)
        engine.scheduler.check()
    return deltas


MIXED: list[tuple[list[int], SamplingParams]] = [
    (PROMPTS[3], GREEDY),
    (printable_prompt(3), GREEDY.replace(stop=[bytes(continuation(printable_prompt(3), 3)).decode()[1:3]])),
    (prompt_before(256), GREEDY.replace(ignore_eos=False, min_tokens=3)),
    ([9, 9, 9], GREEDY.replace(frequency_penalty=2.0, presence_penalty=1.5, max_tokens=30)),
    (PROMPTS[7], SamplingParams(n=3, temperature=6.0, seed=5, max_tokens=9, ignore_eos=True, logprobs=2)),
    (printable_prompt(2), GREEDY.replace(bad_words=[bytes(continuation(printable_prompt(2), 2)).decode()])),
    (PROMPTS[11], GREEDY.replace(prompt_logprobs=1, max_tokens=None)),
    (PROMPTS[5], SamplingParams(temperature=3.0, seed=8, repetition_penalty=1.3, allowed_token_ids=list(range(90)), ignore_eos=True)),
    ([5, 6, 7], GREEDY.replace(stop_token_ids=[continuation([5, 6, 7], 5)[4]])),
]


def plain(output: RequestOutput) -> list[Any]:
    """Everything but times."""
    return [
        output.prompt_logprobs,
        *((one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason) for one in output.outputs),
    ]


def test_everything_at_once_is_the_same_ahead_and_not(built: Callable[..., Engine]) -> None:
    """Stop strings, end of sequence, penalties, n answers, bad words, log-probabilities, in a pool with room and in a tight one."""
    expected = [plain(output) for output in run(built(async_scheduling="off"), MIXED)]
    for options in ({}, {"num_blocks": 40}, {"num_blocks": 40, "preemption": "swap", "host_slots": 200}):
        engine = built(async_scheduling="on", **options)
        assert [plain(output) for output in run(engine, MIXED)] == expected
        assert (engine.snapshot().num_preemptions > 0) == ("num_blocks" in options)


def test_steps_are_launched_before_the_last_one_has_landed(shared_engine: Engine, engine: Engine) -> None:
    trace = engine.trace = StepTrace()
    output = add(engine, "a", [1, 2, 3])
    drive(engine, output)
    engine.trace = None
    is_ahead = shared_engine.scheduler.config.async_scheduling == "on"
    assert [step.was_ahead is not None for step in trace.steps] == [False] + [is_ahead] * 11
    assert output.outputs[0].token_ids == continuation([1, 2, 3], 12)


def test_abort_and_the_same_name_again(engine: Engine) -> None:
    """Rows of a step in flight belong to the request that was, not to the one of its name that is."""
    first, second = PROMPTS[9], PROMPTS[4]
    params = GREEDY.replace(prompt_logprobs=0, max_tokens=3)
    for num_steps in range(1, 5):
        other = add(engine, "other", PROMPTS[2])
        add(engine, "x", first, params)
        for _ in range(num_steps):
            for delta in engine.step():
                if delta.request_id == "other":
                    other.add(delta)
        engine.abort(RequestId("x"))
        engine.scheduler.check()
        output = add(engine, "x", second, params)
        drive(engine, output, other)
        assert other.outputs[0].token_ids == continuation(PROMPTS[2], 12)
        assert output.outputs[0].token_ids == continuation(second, 3)
        assert [entry.chosen.token_id for entry in output.prompt_logprobs[1:]] == second[1:]
        for index in range(1, len(second)):
            expected = expected_logprobs(second[:index])[second[index]]
            assert output.prompt_logprobs[index].chosen.logprob == pytest.approx(expected, abs=1e-3)


def test_a_stop_string_found_while_the_next_token_is_computed(engine: Engine) -> None:
    prompt = printable_prompt(3)
    text = bytes(continuation(prompt, 3)).decode()
    output, other = add(engine, "a", prompt, GREEDY.replace(stop=[text[2]], max_tokens=40)), add(engine, "b", PROMPTS[3])
    deltas = drive(engine, output, other)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (text[:2], continuation(prompt, 3))
    assert sum(delta.is_finished for delta in deltas if delta.request_id == "a") == 1, "every request ends once"
    assert other.outputs[0].token_ids == continuation(PROMPTS[3], 12)


def test_a_step_in_flight_is_work(shared_engine: Engine, engine: Engine) -> None:
    """The last token found a stop string: what was computed beyond it must still land, and says nothing."""
    prompt = printable_prompt(3)
    text = bytes(continuation(prompt, 3)).decode()
    drive(engine, add(engine, "a", prompt, GREEDY.replace(stop=[text[2]], max_tokens=40)))
    assert not engine.scheduler.has_work
    assert engine.has_work == (shared_engine.scheduler.config.async_scheduling == "on")
    assert engine.step() == []
    assert not engine.has_work


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_running_request_with_what_it_has(engine: Engine, clock: Clock) -> None:
    """Text that a stop string held back is shown, and the neighbour goes on."""
    prompt = printable_prompt(3)
    text = bytes(continuation(prompt, 3)).decode()
    before = engine.snapshot().finished_by_reason.get("timeout", 0)
    output = add(engine, "a", prompt, GREEDY.replace(stop=[text[2] + "never"], max_tokens=50), timeout=5.0)
    other = add(engine, "b", PROMPTS[3], GREEDY.replace(max_tokens=20))
    for delta in drive(engine, output, until=3):
        if delta.request_id == "b":
            other.add(delta)
    assert output.outputs[0].text == text[:2], "the third may begin the stop string"
    clock.now += 5.0
    drive(engine, output, other)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (continuation(prompt, 3), text)
    assert output.outputs[0].finish_reason is FinishReason.TIMEOUT
    assert other.outputs[0].token_ids == continuation(PROMPTS[3], 20)
    assert engine.snapshot().finished_by_reason["timeout"] == before + 1


def test_every_unfinished_answer_ends_and_the_ended_ones_stay(engine: Engine, clock: Clock) -> None:
    """Two answers, one of which a stop token ended before."""
    params = SamplingParams(n=2, temperature=8.0, seed=1, max_tokens=60, ignore_eos=True)
    free = run(engine, [([4, 5], params)])[0]
    stop = next(token for token in free.outputs[1].token_ids[:8] if token not in free.outputs[0].token_ids)
    output = add(engine, "a", [4, 5], params.replace(stop_token_ids=[stop]), timeout=1.0)
    drive(engine, output, until=12)
    clock.now += 1.0
    drive(engine, output)
    first, second = output.outputs
    assert (first.finish_reason, second.finish_reason, second.stop_reason) == (FinishReason.TIMEOUT, FinishReason.STOP, stop)
    assert first.token_ids == free.outputs[0].token_ids[: len(first.token_ids)]


def test_the_smaller_timeout_counts_and_waiting_ones_end_too(engine: Engine, clock: Clock) -> None:
    """The engine's own is 1000 seconds. Ten requests for eight slots: two have never run."""
    outputs = [add(engine, f"r{index}", [index + 1], GREEDY.replace(max_tokens=100), timeout=2000.0) for index in range(10)]
    drive(engine, outputs[0], until=2)
    clock.now += 999.0
    assert not any(delta.is_finished for delta in engine.step())
    clock.now += 1.0
    deltas = drive(engine, *outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {FinishReason.TIMEOUT}
    assert outputs[9].outputs[0].token_ids == [], "it never ran"
    assert next(delta for delta in deltas if delta.request_id == "r9").prompt_token_ids == (10,)
    assert not engine.scheduler.has_work


def test_a_deadline_dies_with_its_request(engine: Engine, clock: Clock) -> None:
    """Finished or aborted before; a later request of the same name is another one."""
    drive(engine, add(engine, "a", [1, 2], GREEDY, timeout=5.0))
    add(engine, "b", [1, 2], GREEDY, timeout=5.0)
    engine.abort(RequestId("b"))
    outputs = [add(engine, name, [3, 4], GREEDY.replace(max_tokens=20)) for name in "ab"]
    drive(engine, outputs[0], until=2)
    clock.now += 6.0
    drive(engine, *outputs)
    assert outputs[0].outputs[0].finish_reason is FinishReason.LENGTH


# ---- reused and swapped blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_cached_tokens_are_told_and_counted_by_penalties(built: Callable[..., Engine], ahead: str) -> None:
    """A prompt longer than a step, found in the cache: the penalties must count what nobody feeds to the model."""
    prompt = [(k * 31) % 250 for k in range(70)]
    seen = min(prompt[:60], key=lambda token: abs(token - next_token(prompt)))
    unseen = next(token for token in range(seen, 250) if token not in prompt)
    # Without the penalty on what the prompt has, the first of the two would be chosen.
    choice = GREEDY.replace(allowed_token_ids=[seen, unseen], logit_bias={seen: 100.0, unseen: 80.0})
    params = choice.replace(repetition_penalty=3.0, frequency_penalty=1.0, max_tokens=30)
    fresh = run(built(async_scheduling="off"), [(prompt, params)])[0]
    engine = make_engine(prefix_caching=True, async_scheduling=ahead)
    first, second = run(engine, [(prompt, GREEDY)])[0], run(engine, [(prompt, params)])[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 68), "whole blocks of 4, never the last token"
    assert second.outputs[0].token_ids == fresh.outputs[0].token_ids
    assert engine.snapshot().num_hit_tokens_device == 68
    assert second.outputs[0].token_ids[0] == unseen
    assert run(engine, [(prompt, choice)])[0].outputs[0].token_ids[0] == seen


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_swapped_sequences_keep_their_penalties(built: Callable[..., Engine], ahead: str) -> None:
    params = GREEDY.replace(max_tokens=30, frequency_penalty=2.0, allowed_token_ids=list(range(40, 48)))
    prompts = [prompt[:20] for prompt in PROMPTS[:8]]
    expected = [run(built(async_scheduling="off"), [(prompt, params)])[0].outputs[0].token_ids for prompt in prompts]
    engine = built(num_blocks=40, host_slots=200, preemption="swap", async_scheduling=ahead)
    got = [output.outputs[0].token_ids for output in run(engine, [(prompt, params) for prompt in prompts])]
    assert engine.snapshot().num_preemptions_swap > 0 and engine.snapshot().num_swapped_in_bytes > 0
    assert got == expected


def test_a_lone_request_waits_for_its_blocks(built: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefix lies in host memory and nobody else runs: there is nothing to compute until it has come."""
    engine = built(num_blocks=24, host_slots=100, prefix_caching=True)
    prompt = list(range(60))
    run(engine, [(prompt, GREEDY)])
    run(engine, [([200 - k for k in range(70)], GREEDY)])
    waits: list[int] = []
    wait = engine.runner.mover.wait
    monkeypatch.setattr(engine.runner.mover, "wait", lambda seconds: (waits.append(1), wait(seconds)))
    output = run(engine, [(prompt, GREEDY)])[0]
    assert len(waits) == 1, "it waits once, and does not step in circles"
    assert output.outputs[0].token_ids == continuation(prompt, 12)
    snapshot = engine.snapshot()
    assert snapshot.num_hit_tokens_host > 0 and output.num_cached_tokens > 0
    assert snapshot.fetch_wait_seconds > 0
    assert 0 < snapshot.host_kv_bytes_used <= snapshot.host_kv_bytes_total
    assert snapshot.num_kv_blocks_free + snapshot.num_kv_blocks_cached == snapshot.num_kv_blocks_total == 24


def test_logits_for_takes_cached_blocks_away_and_they_are_found_in_host_memory(built: Callable[..., Engine]) -> None:
    engine = built(num_blocks=24, host_slots=100, prefix_caching=True)
    prompt = list(range(60, 120))
    num_hit = engine.snapshot().num_hit_tokens_host
    run(engine, [(prompt, GREEDY)])
    tokens = [249 - k for k in range(90)]
    logits = engine.logits_for(tokens)[:, :VOCAB_SIZE]
    assert logits.argmax(axis=1).tolist() == [next_token(tokens[: index + 1]) for index in range(90)]
    assert run(engine, [(prompt, GREEDY)])[0].outputs[0].token_ids == continuation(prompt, 12)
    assert engine.snapshot().num_hit_tokens_host > num_hit


def test_close_ends_all_and_lands_what_flies() -> None:
    engine = make_engine()
    for index in range(3):
        add(engine, f"r{index}", PROMPTS[index])
    engine.step()
    engine.step()
    assert engine.has_work
    engine.close()
    assert not engine.has_work and engine.running_ids == ()
    engine.scheduler.check()
    engine.close()


def test_nothing_runs_on_when_the_engine_is_gone() -> None:
    """Bug: a script that ends in the middle of a stream dies with SIGABRT, as XLA's threads go while a program runs."""
    engine = make_engine()
    waits: list[str] = []
    engine._in_flight.append((SimpleNamespace(wait=lambda: waits.append("waited")), StepTimes(0)))  # type: ignore[arg-type]
    del engine
    gc.collect()
    assert waits == ["waited"]


def test_tokens_so_far(engine: Engine) -> None:
    output = add(engine, "a", [1, 2, 3])
    drive(engine, output, until=4)
    assert list(engine.token_ids(RequestId("a"))) == [1, 2, 3, *continuation([1, 2, 3], 4)]
    for name, index in (("b", 0), ("a", 1)):
        with pytest.raises(RequestError, match="no running completion"):
            engine.token_ids(RequestId(name), index)
