"""The packed product in C++ for the CPU (`native.cc`).

A tile of rows of the matrix is unpacked into a buffer that stays in the cache, and multiplied with every row of x before the
next: memory is read once and in packed form. XLA alone would write the whole float matrix first.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from pallas_kernels.common import native
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.packed_matmul.matrix import RUN, PackedMatrix

SOURCE = Path(__file__).with_name("native.cc")
CODE_DTYPES = ("uint8", "int8", "float8_e4m3fn")
SCALE_DTYPES = ("float16", "bfloat16", "float32", "uint8", "int8")
ABSENT = np.zeros(1, np.uint8)
"""In place of an array that the matrix has not: it has one dimension, which no other has. XLA crashes on empty ones where it shards."""


def is_available() -> bool:
    """Whether the kernel runs on this machine, whatever the matrix; it is built if need be."""
    try:
        native.register(SOURCE, "packed_matmul")
    except UnsupportedByKernel:
        return False
    return True


def packed_matmul(x: Float[Array, "M K"], matrix: PackedMatrix) -> Float32[Array, "M N"]:
    """See `api.packed_matmul`.

    Raises:
        UnsupportedByKernel: another device or dtype, rows that are no whole runs, no C++ compiler.
    """
    num_outputs, num_inputs = matrix.shape
    if num_inputs % RUN:
        raise UnsupportedByKernel(f"inputs must be a multiple of {RUN}, got {num_inputs}")
    if matrix.group_size % RUN and matrix.group_size != RUN // 2:
        raise UnsupportedByKernel(f"groups must be {RUN // 2}, a multiple of {RUN} or the whole row, got {matrix.group_size}")
    if str(matrix.codes.dtype) not in CODE_DTYPES:
        raise UnsupportedByKernel(f"codes must be {', '.join(CODE_DTYPES)}, got {matrix.codes.dtype}")
    levels = (matrix.scales, matrix.super_scales, matrix.offsets, matrix.super_offsets, matrix.zeros)
    for array in levels:
        if array is not None and str(array.dtype) not in SCALE_DTYPES:
            raise UnsupportedByKernel(f"scales must be {', '.join(SCALE_DTYPES)}, got {array.dtype}")
    target = native.register(SOURCE, "packed_matmul")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((x.shape[0], num_outputs), jnp.float32))
    return call(
        x.astype(jnp.float32),
        matrix.codes,
        *(ABSENT if array is None else array for array in (matrix.high, *levels)),
        bits=np.int64(matrix.bits),
        zero=np.float32(matrix.zero),
        values=np.asarray(matrix.codebook if matrix.codebook is not None else range(16), np.float32),
    )
