"""write_kv as one XLA scatter, which updates a donated pool in place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common.int8 import round_steps, vector_scales


def write_kv(
    blocks: Num[Array, "K N S D"],
    new: Float[Array, "T K D"],
    slot_mapping: Int32[Array, "T"],
    scales: Float32[Array, "K N S"] | None = None,
) -> tuple[Num[Array, "K N S D"], Float32[Array, "K N S"] | None]:
    """See `api.write_kv`."""
    new = jnp.swapaxes(new, 0, 1)
    if scales is None:
        return _scatter(blocks, new, slot_mapping), None
    new_scales = vector_scales(new)
    rounded = round_steps(new.astype(jnp.float32) / new_scales[..., None])
    return _scatter(blocks, rounded, slot_mapping), _scatter(scales, new_scales, slot_mapping)


def _scatter(pool: Num[Array, "K N S *D"], new: Num[Array, "K T *D"], slot_mapping: Int32[Array, "T"]) -> Num[Array, "K N S *D"]:
    slots = pool.reshape(pool.shape[0], pool.shape[1] * pool.shape[2], *pool.shape[3:])
    return slots.at[:, slot_mapping].set(new.astype(pool.dtype), mode="drop").reshape(pool.shape)
