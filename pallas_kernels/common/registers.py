"""What kernels do with registers that no jax operation on elements says as briefly; each has a model that the interpreter runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir.dialects import llvm  # the only way to an instruction by name
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxtyping import Array, UInt16

LAYOUT = plgpu.Layout.WGMMA
"""Of the words below: words 2 i and 2 i + 1 of a row are one register."""
AND_OR = (0xF0 & 0xCC) | 0xAA
"""The table of lop3: (first and second) or third."""


def shift_pairs(words: UInt16[Array, "N W"], num_bits: int) -> UInt16[Array, "N W"]:
    """Words 2 i and 2 i + 1 of a row as one little-endian number of 32 bits, shifted right, or left by a negative number of bits.

    One instruction for two words; to shift the words themselves takes several. What comes in at one end of a word are bits of its
    neighbour, which the caller masks.
    """

    def on_device(register: ir.Value) -> ir.Value:
        shift = arith.shrui if num_bits > 0 else arith.shli
        return shift(register, _constant(abs(num_bits)))

    def model(array: Array) -> Array:
        pairs = lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 2), jnp.uint32)
        moved = pairs >> np.uint32(num_bits) if num_bits > 0 else pairs << np.uint32(-num_bits)
        return lax.bitcast_convert_type(moved, jnp.uint16).reshape(array.shape)

    return _inline(on_device, model, words) if num_bits else words


def and_or(words: UInt16[Array, "N W"], mask: int, others: int) -> UInt16[Array, "N W"]:
    """(words & mask) | others, in one instruction; with two constants compilers make two of it."""

    def on_device(register: ir.Value) -> ir.Value:
        assembly = f"lop3.b32 $0, $1, {_twice(mask):#x}, {_twice(others):#x}, {AND_OR:#x};"
        result = llvm.inline_asm(_lane(), [register], assembly, "=r,r")
        assert isinstance(result, ir.Value)
        return result

    return _inline(on_device, lambda array: array & np.uint16(mask) | np.uint16(others), words)


@contextlib.contextmanager
def modelling() -> Generator[None]:
    """Inside, the models run: for tests of formulas outside of kernels, traced inside."""
    token = _IS_MODELLING.set(True)
    try:
        yield
    finally:
        _IS_MODELLING.reset(token)


_IS_MODELLING: ContextVar[bool] = ContextVar("is_modelling", default=False)


def _inline(on_device: Callable[[Any], Any], model: Callable[[Array], Array], words: Array) -> Array:
    """`on_device` for each register of `words`."""
    if _IS_MODELLING.get():
        return model(words)

    def each(_: Any, array: FragmentedArray) -> FragmentedArray:
        registers = np.empty_like(array.registers)
        for index, register in np.ndenumerate(array.registers):
            one = ir.VectorType.get((1,), _lane())
            number = vector.extract(vector.bitcast(one, register), [], [0])
            registers[index] = vector.bitcast(register.type, vector.broadcast(one, on_device(number)))
        return FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=array.is_signed)

    setattr(each, "model", model)  # noqa: B010  read by the interpreter
    return_type = plgpu.ShapeDtypeStruct(words.shape, words.dtype, layout=LAYOUT)
    return plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=return_type)(each)(words)


def _lane() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> ir.Value:
    return arith.constant(_lane(), ir.IntegerAttr.get(_lane(), value))


def _twice(word: int) -> int:
    return word << 16 | word
