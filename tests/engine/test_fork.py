"""LLM.fork: one completion continued in several ways equals fresh prompts, on blocks that exist already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.errors import RequestError
from jaxinfer.llm import LLM
from jaxinfer.request import RequestId, SamplingParams
from tests.engine.lookup_model import continuation, make_engine
from tests.engine.test_engine import GREEDY

PROMPT = [(k * 37) % 250 for k in range(30)]


@pytest.fixture(scope="module")
def shared_llm() -> LLM:
    """An LLM around the model of arithmetic, which no checkpoint holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.llm.build_engine", lambda config, on_progress: (make_engine(prefix_caching=True), None))
        return LLM(model="lookup", show_progress=False)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    engine = shared_llm.engine
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    assert engine.snapshot().num_kv_blocks_held == 0


def test_a_finished_completion_goes_on_in_several_ways(llm: LLM) -> None:
    """With suffixes and without; what was computed before is found."""
    source = llm.generate([PROMPT], GREEDY.replace(max_tokens=10))[0]
    so_far = [*PROMPT, *continuation(PROMPT, 10)]
    suffixes = [[1, 2], [3], "abc"]
    ends = [[1, 2], [3], list(b"abc")]
    for output, end in zip(llm.fork(source, GREEDY, suffixes=suffixes), ends, strict=True):
        assert list(output.prompt_token_ids) == so_far + end
        assert output.outputs[0].token_ids == continuation(so_far + end, 12)
        assert output.num_cached_tokens >= 36, "of 40 tokens the last has never been computed, and blocks are of 4"
    lengths = [3, 5]
    outputs = llm.fork(source, [GREEDY.replace(max_tokens=length) for length in lengths])
    assert [output.outputs[0].token_ids for output in outputs] == [continuation(so_far, length) for length in lengths]


def test_one_of_n_completions(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=8.0, seed=3, max_tokens=6, ignore_eos=True)
    source = llm.generate([PROMPT], params)[0]
    (output,) = llm.fork(source, GREEDY, index=1)
    so_far = [*PROMPT, *source.outputs[1].token_ids]
    assert list(output.prompt_token_ids) == so_far
    assert output.outputs[0].token_ids == continuation(so_far, 12)


def test_a_running_stream_is_forked_and_goes_on(llm: LLM) -> None:
    """Its blocks have two holders while the branches run, and the stream misses nothing that came meanwhile."""
    tokens: list[int] = []
    forked: list[int] = []
    holders: list[int] = []
    take_step = llm.engine.step

    def step() -> Any:
        deltas = take_step()
        holders.append(max(llm.engine.kv_map().groups[0].holders))
        return deltas

    for delta in llm.stream(PROMPT, GREEDY.replace(max_tokens=40)):
        tokens += delta.outputs[0].token_ids
        if len(tokens) >= 5 and not forked:
            forked = list(tokens)
            llm.engine.step = step  # type: ignore[method-assign]
            outputs = llm.fork(delta.request_id, [GREEDY, GREEDY.replace(max_tokens=6)], suffixes=[[9], [8, 7]])
            llm.engine.step = take_step  # type: ignore[method-assign]
    assert tokens == continuation(PROMPT, 40)
    for output, end, length in zip(outputs, ([9], [8, 7]), (12, 6), strict=True):
        prompt = [*PROMPT, *forked, *end]
        assert list(output.prompt_token_ids) == prompt
        assert output.outputs[0].token_ids == continuation(prompt, length)
        assert output.num_cached_tokens > 32, "more than the cache of full blocks has: the last, partial one is copied"
    assert max(holders) == 3, "the stream and both branches"


def test_what_cannot_be_forked(llm: LLM) -> None:
    source = llm.generate([PROMPT], GREEDY)[0]
    for call, words in (
        (lambda: llm.fork(RequestId("nobody"), GREEDY), "no running completion 0"),
        (lambda: llm.fork(source, GREEDY, index=1), "index must be from 0 to 0, got 1"),
        (lambda: llm.fork(source, [GREEDY] * 3, suffixes=[[1], [2]]), r"\(2\), got 3"),
        (lambda: llm.fork(source, GREEDY, suffixes=[[1], [1] * 200]), "at most 127 are allowed"),
    ):
        with pytest.raises(RequestError, match=words):
            call()
