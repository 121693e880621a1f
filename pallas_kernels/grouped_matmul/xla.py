"""The grouped product in plain XLA: a loop over the tiles that are used, one dot each.

Every dot has one shape whatever the batch, so that on a CPU a row's result has the same bits in any company.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32


def grouped_matmul(x: Float[Array, "A U K"], weight: Float[Array, "X N K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
    """See `api.grouped_matmul`."""
    num_experts, num_out, _ = weight.shape

    def add_tile(tile: Int32[Array, ""], output: Float32[Array, "A U N"]) -> Float32[Array, "A U N"]:
        of_tile = lax.dynamic_index_in_dim(weight, tile_expert[tile], keepdims=False)
        rows = lax.dynamic_index_in_dim(x, tile, keepdims=False)
        product = lax.dot_general(rows, of_tile, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(output, product, tile, axis=0)

    num_used = jnp.sum(tile_expert < num_experts, dtype=jnp.int32)
    return lax.fori_loop(0, num_used, add_tile, zeros_after(num_used, (*x.shape[:2], num_out)))


def zeros_after(count: Int32[Array, ""], shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """Zeros that are not there before `count`, which is not negative, is known.

    Those that depend on nothing XLA makes for all layers of a program at its start and keeps until each is used: a layer's
    temporaries would count as often as there are layers.
    """
    return jnp.broadcast_to((count < 0).astype(jnp.float32), shape)
