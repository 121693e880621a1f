"""The packed product as a dot with the dequantized matrix, in the dtype of the activations."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.packed_matmul.matrix import PackedMatrix
from pallas_kernels.packed_matmul.reference import dequantize


def packed_matmul(x: Float[Array, "M K"], matrix: PackedMatrix) -> Float32[Array, "M N"]:
    """See `api.packed_matmul`."""
    weight = dequantize(matrix).astype(x.dtype)
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
