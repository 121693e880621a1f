"""The int8 product as XLA's own int8 dot: both operands with the contraction last, the form that is fast on a CPU."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels.int8_matmul.reference import RESIDUAL_STEPS, epilogue, quantize_rows

MIN_ROWS = 8
"""XLA's CPU backend runs int8 dots of fewer rows as naive loops at 1-2 GB/s."""


def int8_matmul(
    x: Float[Array, "M K"],
    weight: Int8[Array, "N K"],
    weight_scale: Float32[Array, "N"],
    *,
    num_terms: int = 1,
    bias: Float[Array, "N"] | None = None,
    activation: str | None = None,
    out_dtype: Any = jnp.float32,
) -> Float[Array, "M N"]:
    """See `api.int8_matmul`; both terms are rows of one dot, so that the weight is read once."""
    num_rows = x.shape[0]
    q, scale = quantize_rows(x, num_terms)
    terms = q.reshape(num_terms * num_rows, x.shape[1])
    padded = jnp.pad(terms, ((0, max(0, MIN_ROWS - terms.shape[0])), (0, 0)))
    products = lax.dot_general(padded, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)
    total = products[:num_rows]
    if num_terms == 2:
        total = total + products[num_rows : 2 * num_rows] / RESIDUAL_STEPS
    return epilogue(total * scale[:, None] * weight_scale[None, :], bias, activation, out_dtype)
