"""write_kv as XLA scatters, which update donated pools in place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common.one_byte import rounded, scales_of


def write_kv(
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S Dv"] | None,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"] | None,
    slot_mapping: Int32[Array, "T"],
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
):
    """See `api.write_kv`."""
    k_blocks, k_scales = _write(k_blocks, k, slot_mapping, k_scales)
    if v_blocks is not None and v is not None:
        v_blocks, v_scales = _write(v_blocks, v, slot_mapping, v_scales)
    return k_blocks, v_blocks, k_scales, v_scales


def _write(blocks: Array, new: Array, slot_mapping: Array, scales: Array | None) -> tuple[Array, Array | None]:
    new = jnp.swapaxes(new, 0, 1)
    if scales is None:
        return _scatter(blocks, new.astype(blocks.dtype), slot_mapping), None
    new_scales = scales_of(new, blocks.dtype)
    numbers = rounded(new.astype(jnp.float32) * (1.0 / new_scales)[..., None], blocks.dtype)
    return _scatter(blocks, numbers, slot_mapping), _scatter(scales, new_scales, slot_mapping)


def _scatter(pool: Num[Array, "K N S *D"], new: Num[Array, "K T *D"], slot_mapping: Int32[Array, "T"]) -> Num[Array, "K N S *D"]:
    slots = pool.reshape(pool.shape[0], pool.shape[1] * pool.shape[2], *pool.shape[3:])
    # Several tokens in one slot are allowed to overwrite each other; were they not, a GPU would write numbers below 4 bytes by atomics.
    return slots.at[:, slot_mapping].set(new, mode="drop", unique_indices=True).reshape(pool.shape)
