"""From logits to tokens: two programs, `sample_greedy` and `sample_full`, pure functions of arrays.

A row's result depends on that row alone, to the last bit: not on the number of rows, on the other rows or on the padding
of the vocabulary. Whatever decides a draw is integer arithmetic (exact in any order), and the float sums of
log-probabilities are added in one fixed order.
"""

from __future__ import annotations

from jaxinfer.sampling.penalties import PenaltyState, new_penalty_state, update_penalty_state
from jaxinfer.sampling.sampler import sample_full, sample_greedy
from jaxinfer.sampling.tensors import NUM_TOP_LOGPROBS, SampleResult, SamplingTensors, pack_flags

__all__ = [
    "NUM_TOP_LOGPROBS",
    "PenaltyState",
    "SampleResult",
    "SamplingTensors",
    "new_penalty_state",
    "pack_flags",
    "sample_full",
    "sample_greedy",
    "update_penalty_state",
]
