"""The formula of the grouped product."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def grouped_matmul(x: Float[Array, "A U K"], weight: Float[Array, "X N K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
    """See `api.grouped_matmul`; an expert past the end has the weight zero."""
    of_tile = weight.at[tile_expert].get(mode="fill", fill_value=0)  # [A N K]
    return jnp.einsum("auk,ank->aun", x.astype(jnp.float32), of_tile.astype(jnp.float32))
