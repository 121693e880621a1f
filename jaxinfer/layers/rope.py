"""Rotary position embedding (arXiv:2104.09864) in Hugging Face's layout: the two halves of a head are rotated."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


@dataclass(frozen=True, slots=True)
class Rope:
    """Which angles a model uses: theta ** (-2 i / D) times the position."""

    theta: float
    head_dim: int
    max_positions: int


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of every position, computed once in float64 on the host.

    A table and not sin() in the step: XLA's vector and scalar sines differ in the last bit, and a token's bits must
    not depend on the batch.
    """

    values: np.ndarray

    @classmethod
    def build(cls, rope: Rope) -> RopeTable:
        """[positions, D]: cos in the first half of the last axis, sin in the second."""
        frequencies = rope.theta ** (-np.arange(0, rope.head_dim, 2, dtype=np.float64) / rope.head_dim)
        angles = np.arange(rope.max_positions, dtype=np.float64)[:, None] * frequencies
        return cls(np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32))


def rotations(table: Float32[Array, "Q D"], positions: Int32[Array, "T"]) -> Float32[Array, "T D"]:
    """cos and sin of each token's position."""
    return table.at[positions].get(mode="clip")


def rotate(x: Float[Array, "T N D"], rotation: Float32[Array, "T D"]) -> Float[Array, "T N D"]:
    """Rotate each head by its token's angles, in float32."""
    cos, sin = jnp.split(rotation[:, None, :], 2, axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
