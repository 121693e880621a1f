"""Paged attention in C++ for the CPU (`native.cc`): keys are read in their blocks, and no further than each row's end.

Against the XLA form, which gathers tiles of keys for the whole batch: no copies, no work past a row's end, one custom call
a layer instead of a loop to compile, and bits that cannot depend on the batch.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common import native
from pallas_kernels.common.dispatch import UnsupportedByKernel

SOURCE = Path(__file__).with_name("native.cc")
LANES = 16
"""Floats of a vector; key and value dims are whole vectors."""
DTYPES = ("float32", "bfloat16", "int8")
EVERYTHING = np.int64(2**40)
"""A window wider than any context."""


def paged_attention(
    q: Float[Array, "T H D"],
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S Dv"] | None,
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, "H"] | None = None,
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    value_dim: int | None = None,
) -> Float[Array, "T H Dv"]:
    """See `api.paged_attention`.

    Raises:
        UnsupportedByKernel: another device or dtype, a key or value dim that is no multiple of 16, no C++ compiler.
    """
    if str(k_blocks.dtype) not in DTYPES:
        raise UnsupportedByKernel(f"the cache must be {' or '.join(DTYPES)}, got {k_blocks.dtype}")
    if v_blocks is None:  # the same buffer twice: values are read with the keys' stride
        v_blocks, v_scales = k_blocks, k_scales
    value_dim = value_dim or v_blocks.shape[3]
    if q.shape[2] % LANES or value_dim % LANES:
        raise UnsupportedByKernel(f"key and value dim must be multiples of {LANES}, got {q.shape[2]} and {value_dim}")
    target = native.register(SOURCE, f"paged_attention_{k_blocks.dtype}")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((*q.shape[:2], value_dim), jnp.float32))
    arrays = (q.astype(jnp.float32), k_blocks, v_blocks, block_tables, query_start_loc, context_lens)
    nothing = jnp.zeros((0,), jnp.float32)
    output = call(
        *arrays,
        *(nothing if array is None else array.astype(jnp.float32) for array in (sinks, k_scales, v_scales)),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
        window=EVERYTHING if window is None else np.int64(window),
    )
    return output.astype(q.dtype)
