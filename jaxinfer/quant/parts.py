"""A fused projection whose pieces are stored in different ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.quant import weight as quant


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Parts:
    """The rows of several matrices, plain or quantized, one after the other.

    Split by rows every device holds its piece of each part, so that its product is that of a shard-major fused matrix.
    """

    weights: tuple[Any, ...]

    @property
    def min_rows(self) -> int:
        """The most that a part asks for."""
        return max(quant.min_rows(part) for part in self.weights)

    def specs(self, spec: PartitionSpec) -> Self:
        """Every part is split as the whole is."""
        return type(self)(tuple(part.specs(spec) if isinstance(part, quant.QuantizedWeight) else spec for part in self.weights))

    def matmul(self, x: Float[Array, "M K"], dtype: jnp.dtype = quant.FLOAT32) -> Float[Array, "M N"]:
        """The parts' products side by side."""
        return jnp.concatenate([quant.matmul(x, part, dtype) for part in self.weights], axis=-1)

    def grouped_matmul(self, x: Float[Array, "A U K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
        """Of stacks, the parts' products side by side."""
        return jnp.concatenate([quant.grouped_matmul(x, part, tile_expert) for part in self.weights], axis=-1)

    def rows(self, ids: Int32[Array, "T"]) -> Float32[Array, "T K"]:
        """Each id's row of the part that it falls into; ids past the end give zeros."""
        total, start = None, 0
        for part in self.weights:
            num_rows = jax.tree.leaves(part)[0].shape[0]
            local = ids - start
            # An id before the part would wrap.
            found = quant.rows(part, jnp.where(local < 0, num_rows, local)).astype(jnp.float32)
            total = found if total is None else total + found
            start += num_rows
        assert total is not None, "Parts of nothing"
        return total

    def dequantize(self) -> np.ndarray:
        """The float32 matrix, on the host."""
        return np.concatenate(
            [part.dequantize() if isinstance(part, quant.QuantizedWeight) else np.asarray(part, np.float32) for part in self.weights],
            axis=-2,
        )
