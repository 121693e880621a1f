"""W8A8: int8 weights with a scale per output channel, activations rounded to int8 per token.

Activations are rounded in two int8 terms, the second one holding the rounding error of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.quant.weight import FLOAT32, Method
from pallas_kernels.int8_matmul import int8_matmul
from pallas_kernels.packed_matmul import PackedMatrix, grouped_packed_matmul

MAX_INT8 = np.float32(127.0)
NUM_TERMS = 2
"""Int8 terms per activation, see `int8_matmul`. With one, SmolLM2's answers are visibly worse: its activations have outliers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Int8Weight:
    """weight[n, k] ~ values[n, k] * scales[n]; symmetric, round half to even, a zero row has scale one."""

    values: Any
    scales: Any

    @classmethod
    def from_float(cls, weight: np.ndarray) -> Self:
        """Quantize a matrix [N K], or a stack [X N K], on the host."""
        weight = np.asarray(weight, np.float32)
        largest = np.abs(weight).max(axis=-1)
        scales = np.where(largest > 0, largest / MAX_INT8, np.float32(1.0)).astype(np.float32)
        values = np.clip(np.rint(weight / scales[..., None]), -MAX_INT8, MAX_INT8).astype(np.int8)
        return cls(values, scales)

    @classmethod
    def abstract(cls, shape: tuple[int, ...]) -> Self:
        """Shapes and dtypes of the parts."""
        values, scales = jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        return cls(values, scales)

    @staticmethod
    def accepts(shape: tuple[int, ...], num_shards: int) -> bool:
        """Any matrix, split in any way: there is one scale per output channel."""
        return True

    @property
    def min_rows(self) -> int:
        """The product is exact at any number; XLA's CPU backend runs fewer int8 rows as naive loops."""
        return 8

    def specs(self, spec: PartitionSpec) -> Self:
        """The scales follow the output channels."""
        axes = tuple(spec) + (None,) * (self.values.ndim - len(spec))
        return type(self)(spec, PartitionSpec(*axes[:-1]))

    def matmul(self, x: Float[Array, "M K"], dtype: jnp.dtype = FLOAT32) -> Float[Array, "M N"]:
        """x @ self.T, x rounded per row."""
        return int8_matmul(x, self.values, self.scales, num_terms=NUM_TERMS, out_dtype=dtype)

    def grouped_matmul(self, x: Float[Array, "A U K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
        """Of a stack, in which x is not rounded: experts have few rows each, and reading the weights is what takes the time.

        Raises:
            UnsupportedByKernel: there is no kernel for it here.
        """
        return grouped_packed_matmul(x, PackedMatrix(codes=self.values, scales=self.scales[..., None], bits=8), tile_expert)

    def rows(self, ids: Int32[Array, "T"]) -> Float32[Array, "T K"]:
        """Dequantized rows; ids past the end give zeros."""
        values = self.values.at[ids].get(mode="fill", fill_value=0)
        scales = self.scales.at[ids].get(mode="fill", fill_value=0)
        return values.astype(jnp.float32) * scales[:, None]

    def dequantize(self) -> np.ndarray:
        """The float32 matrix, on the host."""
        return np.asarray(self.values).astype(np.float32) * np.asarray(self.scales)[..., None]


def make_method(group_size: int, zero_point: bool) -> Method:
    """The method; it has neither groups nor zero points."""
    return Int8Weight
