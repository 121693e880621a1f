"""The formula of paged attention, token by token, no tiling."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Num


def paged_attention(
    q: Float[Array, "T H D"],
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S Dv"] | None,
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, "H"] | None = None,
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    value_dim: int | None = None,
) -> Float[Array, "T H Dv"]:
    """softmax(scale * q k^T) v over the keys that each query may see; see `api.paged_attention`."""
    num_heads = q.shape[1]
    slot, is_seen = _seen_slots(q.shape[0], k_blocks.shape[2], block_tables, query_start_loc, context_lens, window)
    keys = _vectors(k_blocks, k_scales, slot, num_heads)  # [H T C D]
    values = keys[..., :value_dim] if v_blocks is None else _vectors(v_blocks, v_scales, slot, num_heads)
    scores = jnp.einsum("thd,htcd->htc", q.astype(jnp.float32), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    highest = jnp.max(scores, axis=-1, where=is_seen[None], initial=-1e30)
    if sinks is not None:
        highest = jnp.maximum(highest, sinks[:, None])
    # exp(-inf) is zero, but zero times NaN is NaN: what is not seen leaves the values too.
    weights = jnp.exp(jnp.where(is_seen[None], scores, -jnp.inf) - highest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total += jnp.exp(sinks[:, None] - highest)
    output = jnp.einsum("htc,htcd->thd", weights, jnp.where(is_seen[None, :, :, None], values, 0.0))
    return (output / jnp.maximum(total, 1e-30).T[:, :, None]).astype(q.dtype)


def _seen_slots(
    num_tokens: int,
    block_size: int,
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    window: int | None,
) -> tuple[Int32[Array, "T C"], Bool[Array, "T C"]]:
    """The slot of every key of each token's row, and whether the token sees it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(query_start_loc, token, side="right") - 1, 0, context_lens.shape[0] - 1)  # [T]
    position = context_lens[row] - query_start_loc[row + 1] + token  # [T]
    key = jnp.arange(block_tables.shape[1] * block_size, dtype=jnp.int32)[None, :]  # [1 C]
    slot = jnp.take_along_axis(block_tables[row], key // block_size, axis=1) * block_size + key % block_size
    is_seen = (key <= position[:, None]) & (key < context_lens[row][:, None])
    return slot, is_seen if window is None else is_seen & (key > position[:, None] - window)


def _vectors(
    blocks: Num[Array, "K N S D"], scales: Float32[Array, "K N S"] | None, slot: Int32[Array, "T C"], num_heads: int
) -> Float32[Array, "H T C D"]:
    """What lies in the slots, for each query head."""
    num_kv_heads, num_blocks, block_size, head_dim = blocks.shape
    vectors = blocks.reshape(num_kv_heads, num_blocks * block_size, head_dim).astype(jnp.float32)
    if scales is not None:
        vectors = vectors * scales.reshape(num_kv_heads, num_blocks * block_size, 1)
    return jnp.repeat(vectors[:, slot], num_heads // num_kv_heads, axis=0)
