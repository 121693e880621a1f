"""The public signature of the grouped product and its implementations."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.common.mosaic import late
from pallas_kernels.grouped_matmul import native, ragged, reference, xla

OPERATION = Operation(
    name="grouped_matmul",
    implementations={
        "mosaic": late("pallas_kernels.grouped_matmul.mosaic", "grouped_matmul"),
        "native": native.grouped_matmul,
        "ragged": ragged.grouped_matmul,
        "xla": xla.grouped_matmul,
        "reference": reference.grouped_matmul,
    },
    if_named={"mosaic": {"interpret": True}},
)


def grouped_matmul(
    x: Float[Array, "A U K"], weight: Float[Array, "X N K"], tile_expert: Int32[Array, "A"], *, implementation: str | None = None
) -> Float32[Array, "A U N"]:
    """x[a] @ weight[tile_expert[a]].T for every tile a, accumulated in float32.

    The tokens of one expert fill tiles of U rows, so that one product reads one expert's weight; which expert is a value and
    not a shape. Tiles come in the order of their experts and empty ones last: the work is that of the tiles that are used.

    Args:
        x: A tiles of U rows.
        weight: the weights of X experts.
        tile_expert: the expert of each tile, non-decreasing; X for a tile that is empty, whose result is zero.
        implementation: run this one and no other.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if x.ndim != 3 or weight.ndim != 3 or x.shape[2] != weight.shape[2] or tile_expert.shape != x.shape[:1]:
        raise ValueError(f"x {x.shape}, weight {weight.shape} and tile_expert {tile_expert.shape} must be [A U K], [X N K] and [A]")
    if not jnp.issubdtype(tile_expert.dtype, jnp.integer):
        raise ValueError(f"tile_expert must be integers, got {tile_expert.dtype}")
    return OPERATION(x, weight, tile_expert, implementation=implementation)
