"""write_kv as one XLA scatter, which updates a donated pool in place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def write_kv(blocks: Float[Array, "K N S D"], new: Float[Array, "T K D"], slot_mapping: Int32[Array, "T"]) -> Float[Array, "K N S D"]:
    """See `api.write_kv`."""
    num_heads, num_blocks, block_size, head_dim = blocks.shape
    slots = blocks.reshape(num_heads, num_blocks * block_size, head_dim)
    written = slots.at[:, slot_mapping].set(jnp.swapaxes(new, 0, 1).astype(blocks.dtype), mode="drop")
    return written.reshape(blocks.shape)
