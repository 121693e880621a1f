"""Normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.layers.weights import WeightSpec, param


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (arXiv:1910.07467; HF LlamaRMSNorm)."""

    def __init__(self, source: str, size: int, *, eps: float, dtype: jnp.dtype):
        self.weight = param(WeightSpec((source,), (size,), (None,)), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Normalise each token."""
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + jnp.float32(self.eps))
        weight = self.weight.get_value()
        return normed.astype(x.dtype) * weight[None, :].astype(x.dtype)
