"""How a packed matrix is stored: one layout for every format of small integers with scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

RUN = 32
"""Weights that share 16 bytes of nibbles."""


def _static(default: Any) -> Any:
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """A matrix [N K] as codes and scales; axis 0 of every array is N, so that rows can be cut, joined and reordered.

    w[n, k] = scale[n, k // G] * (value(code[n, k]) - zero - zeros[n, k // G]) + offset[n, k // G], where G is `group_size`.

    With fewer than 8 bits the row is cut into R = K / 32 runs: byte j of a run has the low 4 bits of weight j in its low nibble
    and those of weight j + 16 in its high one; the further bits are planes of 32 bits, bit i (little-endian) for weight i.
    A dimension is a count of whole groups or runs, so what divides every array on an axis divides the matrix.
    """

    codes: Any
    """uint8 [N R 16]; with 8 bits int8, uint8 or float8_e4m3fn [N K]."""
    scales: Any
    """float16, bfloat16 or float32 [N C], C groups a row; int8 or uint8 where `super_scales` multiply them."""
    high: Any = None
    """uint8 [N R P 4], the P = bits - 4 planes of the bits above the nibble."""
    super_scales: Any = None
    """float16 or float32 [N S]: each for C / S scales in turn."""
    offsets: Any = None
    """As `scales`; None is no offset."""
    super_offsets: Any = None
    zeros: Any = None
    """uint8 [N C], a zero point for each group."""
    bits: int = _static(4)
    group_size: int = _static(0)
    """G; 0 is the whole row: C is 1."""
    zero: int = _static(0)
    """The zero point of all groups."""
    codebook: tuple[float, ...] | None = _static(None)
    """What the 16 codes stand for, if not themselves."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K]."""
        if self.bits == 8:
            return tuple(self.codes.shape)
        return (*self.codes.shape[:-2], self.codes.shape[-2] * RUN)
