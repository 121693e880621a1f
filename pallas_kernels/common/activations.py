"""Activation functions that a product can end with, in operations that every compiler here knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array, Float32


def silu(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """x * sigmoid(x) (arXiv:1702.03118)."""
    return x / (1.0 + jnp.exp(-x))


def gelu(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """x times the normal distribution function of x (arXiv:1606.08415)."""
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def erf(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The error function to 2e-7 (Abramowitz and Stegun, 7.1.26), for compilers that have none (Mosaic GPU of jax 0.11)."""
    t = 1.0 / (1.0 + 0.3275911 * jnp.abs(x))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return jnp.sign(x) * (1.0 - series * jnp.exp(-x * x))


def gelu_tanh(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The same paper's approximation by tanh."""
    return 0.5 * x * (1.0 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType({"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh})
"""By the name that operations take."""
