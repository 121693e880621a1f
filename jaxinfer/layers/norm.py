"""Normalisation."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxinfer.layers.weights import Source, WeightSpec, param

NormStyle = Literal["llama", "float32", "offset"]
"""How an RMSNorm applies its weight w to the normalised x, float32 inside in any case: `llama` rounds x to the activations'
dtype first, `float32` after the product (OLMo 2, gpt_oss), `offset` multiplies by 1 + w and rounds after it (Gemma)."""


MIN_ROWS, NUM_COLUMNS = 8, 8
"""Of the product that stands for a sum on a CPU: XLA's products of this many rows and more give the same bits."""


def row_mean(x: Float32[Array, "*T E"]) -> Float32[Array, "*T 1"]:
    """The mean over the last axis, with the same bits whatever the other axes are.

    On a CPU a product with ones: XLA adds up a reduction in another order when there is one row, or when it splits many.
    """

    def by_product(x: Float32[Array, "*T E"]) -> Float32[Array, "*T 1"]:
        rows = x.reshape(-1, x.shape[-1])
        padded = jnp.pad(rows, ((0, max(0, MIN_ROWS - rows.shape[0])), (0, 0)))
        ones = jnp.ones((NUM_COLUMNS, x.shape[-1]), jnp.float32)
        sums = lax.dot_general(padded, ones, (((1,), (1,)), ((), ())))[: rows.shape[0], :1]
        return sums.reshape(*x.shape[:-1], 1) / x.shape[-1]

    return lax.platform_dependent(x, cpu=by_product, default=lambda x: jnp.mean(x, axis=-1, keepdims=True))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32 (arXiv:1910.07467)."""

    def __init__(
        self, source: Source | str, size: int, *, eps: float, dtype: jnp.dtype, style: NormStyle = "llama", axis: str | None = None
    ):
        self.weight = param(WeightSpec((source,), (size,), (axis,)), dtype)
        self.eps = eps
        self.style = style

    def __call__(self, x: Float[Array, "*T E"]) -> Float[Array, "*T E"]:
        """Normalise the last axis. On a split axis the mean is over all devices."""
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(row_mean(x32 * x32) + jnp.float32(self.eps))
        weight = self.weight.get_value().reshape((1,) * (x.ndim - 1) + (-1,))
        if self.style == "llama":
            return normed.astype(x.dtype) * weight.astype(x.dtype)
        weight = weight.astype(jnp.float32)
        return (normed * (1.0 + weight if self.style == "offset" else weight)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, computed in float32 (arXiv:1607.06450)."""

    def __init__(self, name: str, size: int, *, eps: float, dtype: jnp.dtype):
        self.weight = param(WeightSpec((f"{name}.weight",), (size,), (None,)), dtype)
        self.bias = param(WeightSpec((f"{name}.bias",), (size,), (None,)), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Normalise each token."""
        x32 = x.astype(jnp.float32)
        centred = x32 - row_mean(x32)
        normed = centred * lax.rsqrt(row_mean(centred * centred) + jnp.float32(self.eps))
        weight, bias = self.weight.get_value()[None, :], self.bias.get_value()[None, :]
        return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
