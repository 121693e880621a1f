"""The formula of the packed product."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.packed_matmul.matrix import PackedMatrix


def dequantize(matrix: PackedMatrix, xp: Any = jnp) -> Any:
    """The float32 matrix [... N K]; `xp` is numpy for arrays of the host."""
    values = _codes(matrix, xp).astype(xp.float32)
    if matrix.codebook is not None:
        values = xp.asarray(matrix.codebook, xp.float32)[_codes(matrix, xp).astype(xp.int32)]
    num_groups = matrix.scales.shape[-1]
    values = values.reshape(*values.shape[:-1], num_groups, values.shape[-1] // num_groups) - xp.float32(matrix.zero)
    if matrix.zeros is not None:
        values = values - matrix.zeros.astype(xp.float32)[..., None]
    values = values * _two_levels(matrix.scales, matrix.super_scales, xp)[..., None]
    if matrix.offsets is not None:
        values = values + _two_levels(matrix.offsets, matrix.super_offsets, xp)[..., None]
    return values.reshape(matrix.shape)


def packed_matmul(x: Float[Array, "M K"], matrix: PackedMatrix) -> Float32[Array, "M N"]:
    """See `api.packed_matmul`."""
    return jnp.matmul(x.astype(jnp.float32), dequantize(matrix).T, precision=lax.Precision.HIGHEST)


def _codes(matrix: PackedMatrix, xp: Any) -> Any:
    """[... N K] unsigned codes; with 8 bits whatever they are stored as."""
    if matrix.bits == 8:
        return matrix.codes
    codes = xp.concatenate([matrix.codes & xp.uint8(15), matrix.codes >> xp.uint8(4)], axis=-1)
    bit = xp.arange(8, dtype=xp.uint8).reshape((1,) * codes.ndim + (8,))
    for plane in range(matrix.bits - 4):
        ones = (matrix.high[..., plane, :, None] >> bit) & xp.uint8(1)
        codes = codes | (ones.reshape(codes.shape) << xp.uint8(4 + plane))
    return codes.reshape(matrix.shape)


def _two_levels(small: Any, large: Any, xp: Any) -> Any:
    if large is None:
        return small.astype(xp.float32)
    return small.astype(xp.float32) * xp.repeat(large.astype(xp.float32), small.shape[-1] // large.shape[-1], axis=-1)
