"""One random draw per row from the truncated distribution, without sorting and without vocabulary-wide noise.

Probabilities become int32 weights whose sum over a row stays below 2**31, so every sum and comparison is exact whatever
its order, and the inverse of the cumulative sum can hit neither a token of weight zero nor the end of the row. A token
whose share of the row is under about 2**-31 has weight zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxinfer.sampling.tensors import SamplingTensors
from jaxinfer.sampling.vocabulary import BLOCK, NEG_INF, block_sums, row_sum, take_block, take_token, top_tokens

NUM_CANDIDATES = 64
"""top_k up to here is read off a list of the best tokens; above it the threshold is bisected."""
GROUP = 32


def draw(logits: Float32[Array, "M P"], row_max: Float32[Array, " M"], tensors: SamplingTensors, is_random: Bool[Array, " M"]) -> Array:
    """A token id per row from softmax(logits / temperature) restricted by min_p, top_k and top_p, in this order.

    min_p keeps tokens of at least min_p times the best one's probability, top_k the k best with all that tie with the
    k-th, top_p the smallest set, closed under ties, whose mass is at least top_p of what min_p and top_k left: a token is
    in it when the tokens above it hold less than that. `row_max` is each row's maximum, and finite. Rows that are not
    `is_random` return an arbitrary token.

    A token drawn outside its top_p set is refused, and the next draw is from the tokens above it. That is exact, because
    what is dropped never belonged to the set; a draw is refused with probability 1 - top_p at most, so this takes a few
    passes where bisecting the threshold takes 31 (the idea is FlashInfer's). It ends: each refusal drops a token, and the
    best one is never refused.
    """
    weights = kept_weights(logits, row_max, tensors, is_random)
    target = top_p_target(row_sum(weights), tensors.top_p)
    streams = row_streams(tensors)
    wants_top_p = tensors.flag("any_truncation") & is_random & (tensors.top_p < 1.0)

    def attempt(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        tokens, floor, is_done, number = carry
        drawn = pick(logits, weights, floor, random_words(streams, number))
        tokens = jnp.where(is_done, tokens, drawn)
        is_inside = lax.cond(
            jnp.any(wants_top_p), lambda: ~wants_top_p | is_in_top_p(logits, weights, tokens, target), lambda: ~wants_top_p
        )
        return tokens, jnp.where(is_done, floor, take_token(logits, tokens)), is_done | is_inside, number + jnp.uint32(1)

    start = (jnp.zeros_like(tensors.position), jnp.full_like(row_max, NEG_INF), ~is_random, jnp.uint32(0))
    return lax.while_loop(lambda carry: ~jnp.all(carry[2]), attempt, start)[0]


def kept_weights(
    logits: Float32[Array, "M P"], row_max: Float32[Array, " M"], tensors: SamplingTensors, is_random: Bool[Array, " M"]
) -> Int32[Array, "M P"]:
    """Integer weights of the tokens that min_p and top_k leave, zero for the others."""
    num_tokens = logits.shape[1]
    wants_top_k = tensors.flag("any_truncation") & is_random & (tensors.top_k > 0) & (tensors.top_k < num_tokens)
    threshold = lax.cond(
        jnp.any(wants_top_k),
        lambda: top_k_threshold(logits, jnp.where(wants_top_k, tensors.top_k, num_tokens)),
        lambda: jnp.full(row_max.shape, NEG_INF, jnp.float32),
    )
    temperature = jnp.where(is_random, tensors.temperature, 1.0)
    return integer_weights(logits, row_max, threshold, temperature, jnp.log(tensors.min_p))


def integer_weights(
    logits: Float32[Array, "M P"],
    row_max: Float32[Array, " M"],
    threshold: Float32[Array, " M"],
    temperature: Float32[Array, " M"],
    log_min_p: Float32[Array, " M"],
) -> Int32[Array, "M P"]:
    """exp((logits - row_max) / temperature), restricted, times a power of two per row, rounded."""
    scaled = (logits - row_max[:, None]) / temperature[:, None]
    keep = (logits >= threshold[:, None]) & (scaled >= log_min_p[:, None])
    share = lax.optimization_barrier(jnp.where(keep, jnp.exp(scaled), 0.0))  # one exp for two uses
    # First an upper bound on the sum in units of 2**-10: a block loses one by rounding its tokens down and one by the shift;
    # a 256th more than covers the rounding of the weights themselves.
    coarse = block_sums((share * 2.0**20).astype(jnp.int32))
    bound = jnp.sum((coarse >> 10) + 2, axis=1)
    bound = bound + (bound >> 8)
    exponent = 41 - (32 - lax.clz(bound))
    scale = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    # Without the barrier XLA may compute a weight twice, in loops that round differently.
    return lax.optimization_barrier((share * scale[:, None] + 0.5).astype(jnp.int32))


def row_streams(tensors: SamplingTensors) -> UInt32[Array, "M 2"]:
    """One threefry key per row, from the request's key and the position."""
    return _fold_in(tensors.key, tensors.position.astype(jnp.uint32))


def random_words(streams: UInt32[Array, "M 2"], attempt: UInt32[Array, ""]) -> UInt32[Array, " M"]:
    """32 random bits per row for the given attempt: threefry of stream and attempt is a key, and one word of it will do."""
    return _fold_in(streams, jnp.broadcast_to(attempt, streams.shape[:1]))[:, 0]


def _fold_in(keys: UInt32[Array, "M 2"], numbers: UInt32[Array, " M"]) -> UInt32[Array, "M 2"]:
    wrapped = jax.random.wrap_key_data(keys, impl="threefry2x32")
    return jax.random.key_data(jax.vmap(jax.random.fold_in)(wrapped, numbers))


def multiply_high(a: UInt32[Array, " M"], b: UInt32[Array, " M"]) -> tuple[UInt32[Array, " M"], UInt32[Array, " M"]]:
    """The high and the low 32 bits of a product of two uint32 (jax has no 64-bit integers by default)."""
    mask = jnp.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> 16, a & mask, b >> 16, b & mask
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    other = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> 16) + (other >> 16), a * b


def pick(
    logits: Float32[Array, "M P"], weights: Int32[Array, "M P"], floor: Float32[Array, " M"], words: UInt32[Array, " M"]
) -> Int32[Array, " M"]:
    """The token at the share `words / 2**32` of each row's cumulative weights in index order, of logits above the floor."""
    num_rows = logits.shape[0]
    sums = block_sums(jnp.where(logits > floor[:, None], weights, 0))
    target = multiply_high(words, jnp.sum(sums, axis=1).astype(jnp.uint32))[0].astype(jnp.int32)
    block, target = _step_into(sums, target)
    block_logits, block_weights = (take_block(array.reshape(num_rows, -1, BLOCK), block) for array in (logits, weights))
    groups = jnp.where(block_logits > floor[:, None], block_weights, 0).reshape(num_rows, BLOCK // GROUP, GROUP)
    group, target = _step_into(jnp.sum(groups, axis=2), target)
    token, _ = _step_into(take_block(groups, group), target)
    return block * BLOCK + group * GROUP + token


def _step_into(weights: Int32[Array, "M n"], target: Int32[Array, " M"]) -> tuple[Int32[Array, " M"], Int32[Array, " M"]]:
    """The first entry whose cumulative weight exceeds the target, and the target counted from its start."""
    num = weights.shape[1]
    # A sum under a triangle: for so few entries it runs as fast as a scan and compiles in a fraction of the time.
    is_up_to = jnp.tri(num, dtype=jnp.bool_)
    cumulative = jnp.sum(jnp.where(is_up_to[None], weights[:, None, :], 0), axis=2)
    is_passed = cumulative <= target[:, None]
    index = jnp.minimum(jnp.sum(is_passed.astype(jnp.int32), axis=1), num - 1)
    return index, target - jnp.max(jnp.where(is_passed, cumulative, 0), axis=1)


def top_p_target(total: Int32[Array, " M"], top_p: Float32[Array, " M"]) -> Int32[Array, " M"]:
    """The smallest integer weight that is at least top_p of the total, and at least 1."""
    fraction = (jnp.clip(top_p, 0.0, 1.0) * 2.0**31).astype(jnp.uint32)
    high, low = multiply_high(fraction, total.astype(jnp.uint32) << 1)
    return jnp.maximum((high + (low != 0).astype(jnp.uint32)).astype(jnp.int32), 1)


def is_in_top_p(
    logits: Float32[Array, "M P"], weights: Int32[Array, "M P"], tokens: Int32[Array, " M"], target: Int32[Array, " M"]
) -> Bool[Array, " M"]:
    """Whether the tokens above this one weigh less than the target; exact."""
    above = row_sum(jnp.where(logits > take_token(logits, tokens)[:, None], weights, 0))
    return above < target


def top_k_threshold(logits: Float32[Array, "M P"], top_k: Int32[Array, " M"]) -> Float32[Array, " M"]:
    """The top_k-th largest logit of each row; -inf where top_k is the row's length."""
    num_tokens = logits.shape[1]
    is_off = top_k >= num_tokens

    def from_candidates() -> Float32[Array, " M"]:
        best, _ = top_tokens(logits, NUM_CANDIDATES)
        return jnp.where(is_off, NEG_INF, take_token(best, top_k - 1))

    return lax.cond(jnp.all(is_off | (top_k <= NUM_CANDIDATES)), from_candidates, lambda: bisected_top_k(logits, top_k))


def bisected_top_k(logits: Float32[Array, "M P"], top_k: Int32[Array, " M"]) -> Float32[Array, " M"]:
    """The same by bisection on the bits of float32, which are ordered like the integers once negatives are flipped.

    Keeps count(logits >= low) >= top_k > count(logits >= high) and stops early where low's count is top_k exactly: such a
    low selects the same tokens as the threshold itself.
    """

    def value(key: Int32[Array, " M"]) -> Float32[Array, " M"]:
        return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)

    def halve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, is_done = carry
        middle = (low & high) + ((low ^ high) >> 1)
        count = row_sum((logits >= value(middle)[:, None]).astype(jnp.int32))
        enough = count >= top_k
        new_low = jnp.where(enough & ~is_done, middle, low)
        new_high = jnp.where(enough | is_done, high, middle)
        return new_low, new_high, is_done | (count == top_k) | (new_high - 1 <= new_low)

    infinity = 0x7F800000
    low = jnp.full(top_k.shape, -infinity - 1, jnp.int32)  # -inf: every token counts
    high = jnp.full(top_k.shape, infinity, jnp.int32)  # +inf: none does, logits are at most the largest float32
    is_done = top_k >= logits.shape[1]
    return value(lax.while_loop(lambda carry: ~jnp.all(carry[2]), halve, (low, high, is_done))[0])
