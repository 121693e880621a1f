"""Rounding vectors to int8 with one scale each, as every operation on int8 does it."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

MAX_INT8 = 127.0


def vector_scales(x: Float[Array, "*batch D"]) -> Float32[Array, "*batch"]:
    """The size of one step for each vector along the last axis: its largest magnitude is 127 steps; zeros have step one."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
    return jnp.where(largest > 0, largest / MAX_INT8, 1.0)


def round_steps(steps: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Whole steps, half to even, within int8; still floats."""
    return jnp.clip(jnp.round(steps), -MAX_INT8, MAX_INT8)
