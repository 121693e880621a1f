"""The packed product as a dot with the dequantized matrix, in the dtype of the activations."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.packed_matmul.matrix import PackedMatrix
from pallas_kernels.packed_matmul.reference import dequantize


def packed_matmul(x: Float[Array, "M K"], matrix: PackedMatrix) -> Float32[Array, "M N"]:
    """See `api.packed_matmul`."""
    if _is_scaled_by_rows(matrix):
        # Codes are exact in any dtype of x. On a GPU their conversion becomes part of the dot; with the scales before it XLA writes
        # the whole matrix to memory at every call (2 bytes a weight out, 2 in again).
        return _dot(x, matrix.codes.astype(x.dtype)) * matrix.scales.astype(jnp.float32)[:, 0][None, :]
    return _dot(x, dequantize(matrix).astype(x.dtype))


def _is_scaled_by_rows(matrix: PackedMatrix) -> bool:
    others = (matrix.super_scales, matrix.offsets, matrix.zeros)
    return matrix.bits == 8 and matrix.scales.shape[-1] == 1 and not matrix.zero and all(array is None for array in others)


def _dot(x: Array, weight: Array) -> Float32[Array, "M N"]:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
