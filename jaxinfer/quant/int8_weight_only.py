"""W8A16: int8 weights with a scale per output channel, activations in floats."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.quant import int8
from jaxinfer.quant.packed import PackedWeight
from jaxinfer.quant.weight import Method
from pallas_kernels.packed_matmul import RUN, PackedMatrix


@dataclass(frozen=True, slots=True)
class Int8WeightOnly:
    """The weights of `int8`, without rounding activations."""

    def from_float(self, weight: np.ndarray) -> PackedWeight:
        """Quantize [N K], or a stack [X N K], on the host."""
        rounded = int8.Int8Weight.from_float(weight)
        return PackedWeight(PackedMatrix(codes=rounded.values, scales=rounded.scales[..., None], bits=8))

    def abstract(self, shape: tuple[int, ...]) -> PackedWeight:
        """Shapes and dtypes of the parts."""
        codes, scales = jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.float32)
        return PackedWeight(PackedMatrix(codes=codes, scales=scales, bits=8))

    def accepts(self, shape: tuple[int, ...], num_shards: int) -> bool:
        """Whole runs of inputs on every device: the kernel's grain."""
        return shape[-1] % (RUN * num_shards) == 0


def make_method(group_size: int, zero_point: bool) -> Method:
    """The method; it has neither groups nor zero points."""
    return Int8WeightOnly()
