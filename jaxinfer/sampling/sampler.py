"""The two sampling programs."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from jaxinfer.sampling.draw import draw
from jaxinfer.sampling.penalties import PenaltyState, penalised
from jaxinfer.sampling.tensors import NUM_TOP_LOGPROBS, SampleResult, SamplingTensors
from jaxinfer.sampling.vocabulary import NEG_INF, clean_logits, first_argmax, row_sum, take_token, top_tokens


def sample_greedy(logits: Float32[Array, "M V"], valid_vocab_size: int) -> Int32[Array, " M"]:
    """The most probable token of each row; among equal ones the lowest id.

    Ids from `valid_vocab_size` on are padding and never chosen, nor is a NaN. A row without any number gives 0.
    """
    return first_argmax(clean_logits(logits, valid_vocab_size))


def sample_full(
    logits: Float32[Array, "M V"],
    tensors: SamplingTensors,
    state: PenaltyState,
    slots: Int32[Array, " M"],
    valid_vocab_size: int,
) -> SampleResult:
    """Choose a token per row with everything that SamplingParams offers.

    In vLLM's order: allowed mask, banned ids and logit bias, penalties; greedy rows take the maximum of that; others divide
    by the temperature, then min_p, top_k, top_p, then one draw. `state` must hold the tokens that this step fed
    (`update_penalty_state` first); it is read only. Several rows of one sequence all see the same state.

    NaN logits count as banned. Where everything is banned the row takes the model's best token whatever bans it, and 0 if
    the model gave no number at all: the result is never NaN, never a padded id and always the same.
    """
    raw = clean_logits(logits, valid_vocab_size)
    changed = lax.cond(tensors.flag("any_mask"), lambda x: _masked(x, tensors.allowed_mask), lambda x: x, raw)
    changed = lax.cond(tensors.flag("any_bias"), lambda x: _biased(x, tensors, logits.shape[1]), lambda x: x, changed)
    changed = lax.cond(tensors.flag("any_penalties"), lambda x: penalised(x, tensors, state, slots), lambda x: x, changed)
    greedy = first_argmax(changed)
    row_max = take_token(changed, greedy)
    is_banned = row_max == NEG_INF
    greedy = lax.cond(jnp.any(is_banned), lambda: jnp.where(is_banned, first_argmax(raw), greedy), lambda: greedy)
    is_random = (tensors.temperature > 0) & (tensors.top_k != 1) & ~is_banned & ~tensors.is_target
    # A banned row has no finite maximum; 0 keeps its unused arithmetic free of NaN.
    finite_max = jnp.where(is_banned, 0.0, row_max)
    drawn = lax.cond(jnp.any(is_random), lambda: draw(changed, finite_max, tensors, is_random), lambda: greedy)
    tokens = jnp.where(is_random, drawn, greedy)
    tokens = jnp.where(tensors.is_target, tensors.target_ids, tokens)
    return _with_logprobs(raw, tokens, tensors)


def _masked(logits: Float32[Array, "M P"], allowed_mask: UInt32[Array, "M num_words"]) -> Float32[Array, "M P"]:
    num_rows, num_tokens = logits.shape
    words = jnp.pad(allowed_mask, ((0, 0), (0, num_tokens // 32 - allowed_mask.shape[1])))
    is_allowed = (words[:, :, None] >> lax.broadcasted_iota(jnp.uint32, (1, 1, 32), 2)) & jnp.uint32(1)
    return jnp.where(is_allowed.reshape(num_rows, num_tokens) != 0, logits, NEG_INF)


def _biased(logits: Float32[Array, "M P"], tensors: SamplingTensors, vocab_size: int) -> Float32[Array, "M P"]:
    rows = lax.broadcasted_iota(jnp.int32, tensors.bias_ids.shape, 0)
    # Ids between V and the blocks' end are padding too, and must not come alive.
    ids = jnp.where(tensors.bias_ids < vocab_size, tensors.bias_ids, logits.shape[1])
    return jnp.minimum(logits.at[rows, ids].add(tensors.bias_values, mode="drop"), jnp.finfo(jnp.float32).max)


def _with_logprobs(raw: Float32[Array, "M P"], tokens: Int32[Array, " M"], tensors: SamplingTensors) -> SampleResult:
    num_rows, num_tokens = raw.shape

    def nothing() -> SampleResult:
        zeros = jnp.zeros((num_rows,), jnp.int32)
        top = jnp.zeros((num_rows, NUM_TOP_LOGPROBS), jnp.int32)
        return SampleResult(
            token_ids=tokens, logprob=zeros.astype(jnp.float32), rank=zeros, top_ids=top, top_logprobs=top.astype(jnp.float32)
        )

    def everything() -> SampleResult:
        top_values, top_ids = top_tokens(raw, NUM_TOP_LOGPROBS)
        row_max = jnp.maximum(top_values[:, :1], jnp.finfo(jnp.float32).min)
        log_sum = jnp.log(row_sum(jnp.exp(raw - row_max)))[:, None]

        def normalised(values: Float32[Array, "M n"]) -> Float32[Array, "M n"]:
            return jnp.where(values > NEG_INF, values - row_max - log_sum, NEG_INF)

        chosen = take_token(raw, tokens)[:, None]
        ids = lax.broadcasted_iota(jnp.int32, (1, num_tokens), 1)
        is_before = (raw > chosen) | ((raw == chosen) & (ids < tokens[:, None]))
        rank = row_sum(is_before.astype(jnp.int32)) + 1
        return SampleResult(
            token_ids=tokens, logprob=normalised(chosen)[:, 0], rank=rank, top_ids=top_ids, top_logprobs=normalised(top_values)
        )

    return lax.cond(tensors.flag("any_logprobs"), everything, nothing)
