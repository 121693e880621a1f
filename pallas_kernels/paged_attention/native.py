"""Paged attention in C++ for the CPU (`native.cc`): keys are read in their blocks, and no further than each row's end.

Against the XLA form, which gathers tiles of keys for the whole batch: no copies, no work past a row's end, one custom call
a layer instead of a loop to compile, and bits that cannot depend on the batch.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.common import native
from pallas_kernels.common.dispatch import UnsupportedByKernel

SOURCE = Path(__file__).with_name("native.cc")
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
DTYPES = ("float32", "bfloat16")
EVERYTHING = np.int64(2**40)
"""A window wider than any context."""


def paged_attention(
    q: Float[Array, "T H D"],
    k_blocks: Float[Array, "K N S D"],
    v_blocks: Float[Array, "K N S D"],
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "T H D"]:
    """See `api.paged_attention`.

    Raises:
        UnsupportedByKernel: another device or dtype, a head dim that is not compiled in, no C++ compiler.
    """
    if str(k_blocks.dtype) not in DTYPES:
        raise UnsupportedByKernel(f"the cache must be {' or '.join(DTYPES)}, got {k_blocks.dtype}")
    if q.shape[2] not in HEAD_DIMS:
        raise UnsupportedByKernel(f"head dim must be one of {HEAD_DIMS}, got {q.shape[2]}")
    target = native.register(SOURCE, f"paged_attention_{k_blocks.dtype}")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    output = call(
        q.astype(jnp.float32),
        k_blocks,
        v_blocks,
        block_tables,
        query_start_loc,
        context_lens,
        scale=np.float32(scale),
        window=EVERYTHING if window is None else np.int64(window),
    )
    return output.astype(q.dtype)
