"""The grouped product as XLA's ragged dot, for devices where that is one grouped GEMM."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import device


def grouped_matmul(x: Float[Array, "A U K"], weight: Float[Array, "X N K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
    """See `api.grouped_matmul`.

    Raises:
        UnsupportedByKernel: where XLA multiplies every row with every expert: on a CPU and on NVIDIA's GPUs (jax 0.11.2 makes
            1.4 GiB of temporaries for 64 tokens of Qwen3-30B-A3B on an H200).
    """
    if device().kind == "cpu" or "NVIDIA" in device().kind:
        raise UnsupportedByKernel(f"here ({device().kind}) XLA multiplies every row with every expert")
    return ragged_product(x, weight, tile_expert)


def ragged_product(x: Float[Array, "A U K"], weight: Float[Array, "X N K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
    """The product on any device: an expert's rows are one run, for its tiles follow each other."""
    num_tiles, tile_rows, num_in = x.shape
    num_experts, num_out, _ = weight.shape
    tiles_of_expert = jnp.zeros(num_experts, jnp.int32).at[tile_expert].add(1, mode="drop")
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
    )
    rows = x.reshape(num_tiles * tile_rows, num_in)
    product = lax.ragged_dot_general(rows, weight, tiles_of_expert * tile_rows, dimensions, preferred_element_type=jnp.float32)
    # What the dot leaves past the last run differs between backends.
    is_used = (tile_expert < num_experts)[:, None, None]
    return jnp.where(is_used, product.reshape(num_tiles, tile_rows, num_out), 0.0)
