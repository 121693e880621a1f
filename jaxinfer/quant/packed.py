"""Weights kept as small integers and scales, multiplied with activations in floats (W4A16, W8A16 and what checkpoints hold)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.quant.weight import FLOAT32, PLAIN_MIN_ROWS
from pallas_kernels.packed_matmul import PackedMatrix, dequantize, grouped_packed_matmul, native, packed_matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A `PackedMatrix`, or a stack of them, as a weight."""

    matrix: PackedMatrix

    @property
    def min_rows(self) -> int:
        """1 where the kernel in C++ runs; what XLA makes of it is a product of floats."""
        return 1 if native.is_available() else PLAIN_MIN_ROWS

    def specs(self, spec: PartitionSpec) -> Self:
        """Groups and runs lie on the axis of the inputs; one scale for a whole row goes to every device."""
        matrix = self.matrix
        axes = tuple(spec) + (None,) * (len(matrix.shape) - len(spec))
        rows, inputs = axes[:-1], axes[-1]
        parts = {}
        for field in fields(matrix):
            leaf = getattr(matrix, field.name)
            if field.metadata.get("static") or leaf is None:
                parts[field.name] = leaf
            else:
                is_whole_row = matrix.group_size == 0 and field.name not in ("codes", "high")
                parts[field.name] = PartitionSpec(*rows, None if is_whole_row else inputs)
        return type(self)(PackedMatrix(**parts))

    def matmul(self, x: Float[Array, "M K"], dtype: jnp.dtype = FLOAT32) -> Float[Array, "M N"]:
        """x @ self.T, x as it is."""
        return packed_matmul(x, self.matrix).astype(dtype)

    def grouped_matmul(self, x: Float[Array, "A U K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
        """Of a stack, x as it is.

        Raises:
            UnsupportedByKernel: there is no kernel for it here.
        """
        return grouped_packed_matmul(x, self.matrix, tile_expert)

    def rows(self, ids: Int32[Array, "T"]) -> Float32[Array, "T K"]:
        """Dequantized rows; ids past the end give zeros."""
        return dequantize(jax.tree.map(lambda leaf: leaf.at[ids].get(mode="fill", fill_value=0), self.matrix))

    def dequantize(self) -> np.ndarray:
        """The float32 matrix, on the host."""
        return dequantize(jax.tree.map(np.asarray, self.matrix), np)
