"""SamplingParams refuses what cannot work, and outputs are built from deltas."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import RequestError
from jaxinfer.request import CompletionOutput, FinishReason, RequestDelta, RequestId, RequestOutput, SamplingParams

BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
      for value in (math.nan, math.inf, -math.inf, 10**400, -5, "1", None, True, [1])],
    *[(name, value) for name in ("n", "max_tokens", "min_tokens", "top_k", "seed") for value in (1.5, "1", True, 10**30, -(10**30))],
    ("n", 0), ("n", 129), ("max_tokens", 0), ("min_tokens", -1), ("top_k", -2), ("logprobs", -1), ("logprobs", 21), ("prompt_logprobs", 21),
    ("top_p", 0.0), ("repetition_penalty", 0.0), ("stop", ""), ("stop", [""]), ("stop", [None]), ("stop", 5), ("stop", ["a"] * 17),
    ("stop_token_ids", [-1]), ("stop_token_ids", "12"), ("allowed_token_ids", []), ("bad_words", [""]), ("ignore_eos", 1),
    ("logit_bias", {5: 101}), ("logit_bias", {5: None}), ("logit_bias", {"5": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", [1]),
    ("logit_bias", dict.fromkeys(range(301), 1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: f"{value!r:.24}")
def test_bad_values_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert (caught.value.param or "").startswith(name)
    assert len(str(caught.value)) < 300, "a hostile value must not become the message"


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match=r"at most max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


@given(
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 10**12),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(-(2**63), 2**64 - 1),
    penalty=st.floats(-2, 2),
)
def test_good_values_pass(temperature: float, top_k: int, top_p: float, seed: int, penalty: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, presence_penalty=penalty)
    assert params.is_greedy == (temperature < 1e-5 or top_k == 1)
    assert params.replace(temperature=0.0).is_greedy


def test_outputs_add_up() -> None:
    output = RequestOutput.empty(RequestId("r"), "p", (1, 2), 2)
    output.add(RequestDelta(RequestId("r"), [CompletionOutput(1, [7], "se")]))
    output.add(
        RequestDelta(RequestId("r"), [CompletionOutput(0, [5], "fi"), CompletionOutput(1, [8], "cond", None, FinishReason.STOP, "x")])
    )
    output.add(RequestDelta(RequestId("r"), [CompletionOutput(0, [6], "rst", None, FinishReason.LENGTH)], is_finished=True))
    first, second = output.outputs
    assert (first.token_ids, first.text, first.finish_reason) == ([5, 6], "first", FinishReason.LENGTH)
    assert (second.token_ids, second.text, second.finish_reason, second.stop_reason) == ([7, 8], "second", FinishReason.STOP, "x")
    assert output.is_finished
