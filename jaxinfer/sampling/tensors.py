"""What the sampler reads and returns. `M` is the number of logit rows, `V` the padded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

NUM_TOP_LOGPROBS = 20
"""Best tokens reported for a row when anyone asks for log-probabilities."""

FLAG_NAMES = ("any_penalties", "any_bias", "any_mask", "any_truncation", "any_logprobs")
"""The order of `SamplingTensors.flags`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingTensors:
    """Sampling parameters, one entry per row of logits.

    `temperature` 0 makes a row greedy. `top_k` 0 (or >= V), `top_p` 1 and `min_p` 0 are off; so are a
    `repetition_penalty` of 1 and the other penalties at 0. `key` is `derive_key`'s two words and `position` the index of the
    token to be sampled, folded into it. `bias_values` are added to `bias_ids` (ids >= V are padding and dropped; never
    negative ids, they wrap); -inf bans. Bit `v % 32` of word `v // 32` of `allowed_mask` allows token v. An `is_target` row
    samples nothing: its token is `target_ids`, reported with its log-probability (prompt log-probabilities).

    `flags` (see `pack_flags`) skip the work that no row asked for. A flag that is 0 while a row needs it leaves that
    row's parameter without effect; one that is 1 for nothing costs time and changes no bit.
    """

    temperature: Float32[Array, " M"]
    top_k: Int32[Array, " M"]
    top_p: Float32[Array, " M"]
    min_p: Float32[Array, " M"]
    repetition_penalty: Float32[Array, " M"]
    presence_penalty: Float32[Array, " M"]
    frequency_penalty: Float32[Array, " M"]
    key: UInt32[Array, "M 2"]
    position: Int32[Array, " M"]
    bias_ids: Int32[Array, "M num_biases"]
    bias_values: Float32[Array, "M num_biases"]
    allowed_mask: UInt32[Array, "M num_words"]
    target_ids: Int32[Array, " M"]
    is_target: Bool[Array, " M"]
    flags: Int32[Array, " 5"]

    def flag(self, name: str) -> Bool[Array, ""]:
        """One of FLAG_NAMES as a traced boolean."""
        return self.flags[FLAG_NAMES.index(name)] != 0


def pack_flags(*, any_penalties: bool, any_bias: bool, any_mask: bool, any_truncation: bool, any_logprobs: bool) -> np.ndarray:
    """`SamplingTensors.flags` on the host: int32[5]. `any_truncation` stands for top_k and top_p; min_p needs no flag."""
    return np.array([any_penalties, any_bias, any_mask, any_truncation, any_logprobs], np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """What came out, one entry per row.

    `logprob` (nats) and `rank` of the chosen (or target) token and the best tokens `top_ids` are the model's own: before
    mask, bias, penalties and temperature, over the valid vocabulary. Equal logits rank by token id. All four are zero where
    `any_logprobs` is 0. A logit of -inf or NaN has log-probability -inf. Beyond the valid vocabulary `top_logprobs` is -inf.
    """

    token_ids: Int32[Array, " M"]
    logprob: Float32[Array, " M"]
    rank: Int32[Array, " M"]
    top_ids: Int32[Array, "M 20"]
    top_logprobs: Float32[Array, "M 20"]
