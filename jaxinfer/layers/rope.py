"""Rotary position embedding (arXiv:2104.09864) with the scalings of Hugging Face's `modeling_rope_utils.py`.

Angles are a table of all positions, computed once in float64 on the host, and not sin() in the step: XLA's vector and
scalar sines differ in the last bit, and a token's bits must not depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


class Scaling(Protocol):
    """How a rotation is stretched beyond the context that the model was first trained with."""

    def angles(self, rope: Rope, num_positions: int) -> np.ndarray:
        """float64 [positions, size / 2]."""
        ...

    @property
    def magnitude(self) -> float:
        """What rotated vectors are multiplied by."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Which angles a layer uses: position times theta ** (-2 i / size), or what `scaling` makes of that.

    `size` is how many entries of each head are rotated, the first ones.
    """

    theta: float
    size: int
    scaling: Scaling | None = None

    def frequencies(self) -> np.ndarray:
        """Angle per position of each pair, unscaled: float64 [size / 2]."""
        return frequencies(self.theta, self.size)


def frequencies(theta: float, size: int) -> np.ndarray:
    """theta ** (-2 i / size), float64 [size / 2]."""
    return theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)


def rope_table(rope: Rope, num_positions: int) -> np.ndarray:
    """Float32 [positions, size]: cos in the first half of the last axis, sin in the second."""
    if rope.scaling is None:
        angles, magnitude = _times_positions(rope.frequencies(), num_positions), 1.0
    else:
        angles, magnitude = rope.scaling.angles(rope, num_positions), rope.scaling.magnitude
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=-1) * magnitude).astype(np.float32)


def rotations(tables: Float32[Array, "R Q D"], positions: Int32[Array, "T"]) -> Float32[Array, "R T D"]:
    """cos and sin of each token's position, for each of the model's rotations."""
    return tables.at[:, positions].get(mode="clip")


def rotate(x: Float[Array, "T N D"], rotation: Float32[Array, "T d"], *, is_interleaved: bool = False) -> Float[Array, "T N D"]:
    """Rotate the first d entries of each head by its token's angles, in float32; the others pass through.

    Entry i turns together with i + d / 2. With `is_interleaved` (DeepSeek) the pairs come in as neighbours, 2 i and 2 i + 1;
    they leave as halves all the same, which no product of two rotated vectors can tell.
    """
    size = rotation.shape[-1]
    cos, sin = jnp.split(rotation[:, None, :], 2, axis=-1)
    turned, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if is_interleaved else jnp.split(turned, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def _times_positions(per_position: np.ndarray, num_positions: int) -> np.ndarray:
    return np.arange(num_positions, dtype=np.float64)[:, None] * per_position


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float
    magnitude: float = 1.0

    def angles(self, rope: Rope, num_positions: int) -> np.ndarray:
        """See `Scaling`."""
        return _times_positions(rope.frequencies() / self.factor, num_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicScaling:
    """A base that grows with the length past the original context (dynamic NTK).

    Position p is rotated with the base of a sequence that ends there, as transformers does when it decodes token by token:
    how a prompt is cut into steps, or what comes after it, then changes nothing.
    """

    factor: float
    original_positions: int
    magnitude: float = 1.0

    def angles(self, rope: Rope, num_positions: int) -> np.ndarray:
        """See `Scaling`."""
        positions = np.arange(num_positions, dtype=np.float64)
        lengths = np.maximum(positions + 1, self.original_positions)
        growth = self.factor * lengths / self.original_positions - (self.factor - 1)
        bases = rope.theta * growth ** (rope.size / (rope.size - 2))
        return positions[:, None] * bases[:, None] ** (-np.arange(0, rope.size, 2, dtype=np.float64) / rope.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Waves longer than the original context slowed down by a factor, short ones left alone, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    magnitude: float = 1.0

    def angles(self, rope: Rope, num_positions: int) -> np.ndarray:
        """See `Scaling`."""
        plain = rope.frequencies()
        turns = self.original_positions * plain / (2 * math.pi)  # within the original context
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return _times_positions((1 - kept) * plain / self.factor + kept * plain, num_positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): as Llama3Scaling, blended over the index of the wave; scores grow with the factor.

    `magnitude` is HF's attention_factor. `mscale_all_dim` is no part of the rotation: DeepSeek multiplies its scores by
    `yarn_magnitude(factor, mscale_all_dim)` squared.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    is_truncated: bool
    magnitude: float
    mscale_all_dim: float = 0.0

    def angles(self, rope: Rope, num_positions: int) -> np.ndarray:
        """See `Scaling`."""
        low, high = self._wave_that_turns(rope, self.beta_fast), self._wave_that_turns(rope, self.beta_slow)
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.size - 1)
        if low == high:
            high += 0.001
        slowed = np.clip((np.arange(rope.size // 2) - low) / (high - low), 0, 1)
        plain = rope.frequencies()
        return _times_positions(slowed * plain / self.factor + (1 - slowed) * plain, num_positions)

    def _wave_that_turns(self, rope: Rope, num_turns: float) -> float:
        """Index of the wave that turns this often within the original context."""
        return rope.size * math.log(self.original_positions / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1 (arXiv:2309.00071, 3.4); 1 for a factor of at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): a factor for each wave, other ones past the original context.

    An engine has one table: it takes the long factors when its sequences may grow past the original context
    (`max_model_len`), else the short ones. transformers decides anew for each sequence, and recomputes it when it grows past.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    magnitude: float

    def angles(self, rope: Rope, num_positions: int) -> np.ndarray:
        """See `Scaling`."""
        factors = self.long_factors if num_positions > self.original_positions else self.short_factors
        return _times_positions(rope.frequencies() / np.array(factors), num_positions)
