"""The formula of paged attention, token by token, no tiling."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def paged_attention(
    q: Float[Array, "T H D"],
    k_blocks: Float[Array, "K N S D"],
    v_blocks: Float[Array, "K N S D"],
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "T H D"]:
    """softmax(scale * q k^T) v over the keys that each query may see; see `api.paged_attention`."""
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, num_blocks, block_size, head_dim = k_blocks.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(query_start_loc, token, side="right") - 1, 0, context_lens.shape[0] - 1)  # [T]
    position = context_lens[row] - query_start_loc[row + 1] + token  # [T]
    key = jnp.arange(block_tables.shape[1] * block_size, dtype=jnp.int32)[None, :]  # [1 C]
    slot = jnp.take_along_axis(block_tables[row], key // block_size, axis=1) * block_size + key % block_size  # [T C]
    is_seen = (key <= position[:, None]) & (key < context_lens[row][:, None])
    if window is not None:
        is_seen &= key > position[:, None] - window
    group = num_heads // num_kv_heads
    pool = (num_kv_heads, num_blocks * block_size, head_dim)
    keys = jnp.repeat(k_blocks.reshape(pool).astype(jnp.float32)[:, slot], group, axis=0)  # [H T C D]
    values = jnp.repeat(v_blocks.reshape(pool).astype(jnp.float32)[:, slot], group, axis=0)
    scores = jnp.einsum("thd,htcd->htc", q.astype(jnp.float32), keys) * scale
    # exp(-inf) is zero, but zero times NaN is NaN: what is not seen leaves the values too.
    weights = jnp.exp(
        jnp.where(is_seen[None], scores, -jnp.inf) - jnp.max(scores, axis=-1, keepdims=True, where=is_seen[None], initial=-1e30)
    )
    total = jnp.maximum(jnp.sum(weights, axis=-1), 1e-30)
    output = jnp.einsum("htc,htcd->thd", weights, jnp.where(is_seen[None, :, :, None], values, 0.0))
    return (output / total.T[:, :, None]).astype(q.dtype)
