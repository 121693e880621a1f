"""16-bit words of codes -> bfloat16 numbers, exactly and element by element, so that nothing moves between lanes.

A word holds two codes of 8 bits or four of 4. All that are at one place in their words make a plane of the same shape. bfloat16
has 7 bits after the point: with the exponent of 128 in front of them, 7 bits of a code are a number between 128 and 255.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, UInt16

from pallas_kernels.common.registers import and_or, shift_pairs

EXPONENT_128 = 0x4300
EXPONENT_2 = 0x4000
RUN_WORDS = 8
"""Words whose planes lie one after the other in what a product takes: the columns of one tile of the register layout."""

type Unpack = Callable[[Array, int, Any], Array]
"""(words [N W], place in the word, zero point) -> bfloat16 [N W]."""


def numbers(words: UInt16[Array, "N W"], bits: int, unpack: Unpack, zero: Any) -> BFloat16[Array, "N K"]:
    """All codes of some words, in the order of `in_order`; to put planes together moves no register."""
    planes = [unpack(words, place, zero) for place in range(16 // bits)]
    starts = range(0, words.shape[1], RUN_WORDS)
    return jnp.concatenate([lax.slice(plane, (0, i), (words.shape[0], i + RUN_WORDS)) for i in starts for plane in planes], axis=1)


def in_order(x: BFloat16[Array, "M K"], bits: int) -> BFloat16[Array, "M K"]:
    """x with its columns in the order of `numbers`. XLA does it as it writes x: M * K * 2 bytes."""
    num_rows, num_inputs = x.shape
    if bits == 8:
        return x.reshape(num_rows, -1, RUN_WORDS, 2).transpose(0, 1, 3, 2).reshape(num_rows, num_inputs)
    # Byte j of a run has weight j in its low nibble and weight j + 16 in its high one; a word is two bytes.
    return x.reshape(num_rows, -1, 2, RUN_WORDS, 2).transpose(0, 1, 4, 2, 3).reshape(num_rows, num_inputs)


def unsigned4(words: UInt16[Array, "N W"], place: int, zero: Any) -> BFloat16[Array, "N W"]:
    """A nibble minus a zero point, which is a number or bfloat16 [N W]."""
    return _number(and_or(shift_pairs(words, 4 * place), 0x000F, EXPONENT_128)) - (zero + 128)


def signed8(words: UInt16[Array, "N W"], place: int, zero: Any) -> BFloat16[Array, "N W"]:
    """A byte of two's complement: its lower 7 bits minus 128 if the upper one is set, which doubles a number with the exponent of 128."""
    low, high = _seven_and_one(words, place)
    return _minus(low - high, zero)


def unsigned8(words: UInt16[Array, "N W"], place: int, zero: Any) -> BFloat16[Array, "N W"]:
    """A byte without sign; in this order every sum is a number of at most 8 bits."""
    low, high = _seven_and_one(words, place)
    return _minus((low - 256) + high, zero)


def e4m3(words: UInt16[Array, "N W"], place: int, zero: Any) -> BFloat16[Array, "N W"]:
    """2 ** 8 times a float8_e4m3fn."""
    magnitude = and_or(shift_pairs(words, 8 * place - 4), 0x07F0, EXPONENT_2)
    return _minus(_small_float(magnitude, shift_pairs(words, 8 * place - 8)), zero)


def e2m1(words: UInt16[Array, "N W"], place: int, zero: Any) -> BFloat16[Array, "N W"]:
    """4 times a 4-bit float."""
    magnitude = and_or(shift_pairs(words, 4 * place - 6), 0x01C0, EXPONENT_2)
    return _minus(_small_float(magnitude, shift_pairs(words, 4 * place - 12)), zero)


def _seven_and_one(words: Array, place: int) -> tuple[Array, Array]:
    byte = shift_pairs(words, 8 * place)
    return _number(and_or(byte, 0x007F, EXPONENT_128)), _number(and_or(byte, 0x0080, EXPONENT_128))


def _small_float(magnitude: Array, signed: Array) -> Array:
    """An exponent and a mantissa where bfloat16 has its own, after `EXPONENT_2`: 2 is what exponent 0 and mantissa 0 stand for.

    At exponent 0 such floats have no leading one and the steps of exponent 1; only there 2 t - 4 is less than t.
    """
    number = _number(magnitude)
    number = jnp.minimum(number, (number - 4) + number)
    return _number(lax.bitcast_convert_type(number, jnp.uint16) | (signed & np.uint16(0x8000)))


def _minus(number: Array, zero: Any) -> Array:
    return number if isinstance(zero, int) and zero == 0 else number - zero


def _number(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
