"""Vectors kept in one byte a number, with a float32 scale for each vector."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Num

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""By dtype, the number that a vector's largest magnitude becomes. float8_e4m3fn could hold no larger one (arXiv:2209.05433)."""

SMALLEST = 2.0**-100
"""Vectors without a larger number count as zeros: 1 / scale must be finite."""


def has_scales(dtype: Any) -> bool:
    """Whether vectors of this dtype come with scales: those of one byte do, and no others."""
    return jnp.dtype(dtype).name in LARGEST


def scales_of(x: Float[Array, "*batch D"], dtype: Any) -> Float32[Array, "*batch"]:
    """The scale of each vector along the last axis: its largest magnitude * (1 / `LARGEST`); a vector of zeros has scale one.

    A product and not a quotient, as is x * (1 / scale): XLA makes such products of quotients by itself, and every implementation
    is to give the same bits.
    """
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
    return jnp.where(largest > SMALLEST, largest * inverse(LARGEST[jnp.dtype(dtype).name]), 1.0)


def inverse(largest: float) -> np.float32:
    """1 / largest, in float32."""
    return np.float32(1.0) / np.float32(largest)


def rounded(x: Float32[Array, "*shape"], dtype: Any) -> Num[Array, "*shape"]:
    """x to the nearest number of `dtype`, half to even, the largest where it is beyond."""
    largest = LARGEST[jnp.dtype(dtype).name]
    if jnp.issubdtype(dtype, jnp.integer):
        x = jnp.round(x)
    return jnp.clip(x, -largest, largest).astype(dtype)
