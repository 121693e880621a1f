"""The grouped product in C++ for the CPU (`native.cc`).

Against the XLA form, whose loop copies an expert's whole weight before each tile: weights are read once, where they lie.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common import native
from pallas_kernels.common.dispatch import UnsupportedByKernel

SOURCE = Path(__file__).with_name("native.cc")
DTYPES = ("float32", "bfloat16")
LANES = 16
"""Floats of a vector."""


def grouped_matmul(x: Float[Array, "A U K"], weight: Float[Array, "X N K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
    """See `api.grouped_matmul`.

    Raises:
        UnsupportedByKernel: another device or dtype, inputs that are no whole vectors, no C++ compiler.
    """
    if str(weight.dtype) not in DTYPES:
        raise UnsupportedByKernel(f"weights must be {' or '.join(DTYPES)}, got {weight.dtype}")
    if weight.shape[2] % LANES:
        raise UnsupportedByKernel(f"inputs must be a multiple of {LANES}, got {weight.shape[2]}")
    target = native.register(SOURCE, "grouped_matmul")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((*x.shape[:2], weight.shape[1]), jnp.float32))
    return call(x.astype(jnp.float32), weight, tile_expert.astype(jnp.int32))
