"""The formula of the int8 product."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels.common.activations import ACTIVATIONS
from pallas_kernels.common.int8 import round_steps, vector_scales

RESIDUAL_STEPS = 254.0
"""Steps of the second term in one step of the first: its half step of rounding error becomes the full int8 range."""


def quantize_rows(x: Float[Array, "M K"], num_terms: int) -> tuple[Int8[Array, "C M K"], Float32[Array, "M"]]:
    """Round each row to int8 with one scale; a row of zeros has scale one.

    With one term x ~ q[0] * scale, with two x ~ (q[0] + q[1] / RESIDUAL_STEPS) * scale.
    """
    x = x.astype(jnp.float32)
    scale = vector_scales(x)
    steps = x / scale[:, None]
    first = round_steps(steps)
    terms = [first]
    if num_terms == 2:
        terms.append(round_steps((steps - first) * RESIDUAL_STEPS))
    return jnp.stack(terms).astype(jnp.int8), scale


def epilogue(product: Float32[Array, "M N"], bias: Float[Array, "N"] | None, activation: str | None, out_dtype: Any) -> Float[Array, "M N"]:
    """What follows a product; float32 up to the end."""
    if bias is not None:
        product = product + bias.astype(jnp.float32)[None, :]
    if activation is not None:
        product = ACTIVATIONS[activation](product)
    return product.astype(out_dtype)


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
    """See `api.int8_matmul`."""
    q, scale = quantize_rows(x, num_terms)
    # Integers of this size are exact in int32 whatever the order of the sum.
    products = jnp.einsum("cmk,nk->cmn", q.astype(jnp.int32), weight.astype(jnp.int32)).astype(jnp.float32)
    total = products[0] if num_terms == 1 else products[0] + products[1] / RESIDUAL_STEPS
    return epilogue(total * scale[:, None] * weight_scale[None, :], bias, activation, out_dtype)
