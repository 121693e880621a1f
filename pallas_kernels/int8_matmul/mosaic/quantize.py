"""Rounding rows to int8 in one kernel that reads them once. XLA makes three of it, and reads them twice."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels.common import mosaic
from pallas_kernels.common.int8 import MAX_INT8, round_steps
from pallas_kernels.int8_matmul import reference
from pallas_kernels.int8_matmul.reference import RESIDUAL_STEPS

LANES = 128
"""Threads of a warpgroup, each of which holds the same number of a piece's elements."""
PIECES = (1024, 512, 256, 128)
"""Elements that are loaded at once: up to eight by a thread, in one instruction."""
MAX_PART = 6144
"""Elements of a row that one warpgroup keeps in registers."""
MAX_WARPGROUPS = 8


def quantize_rows(x: Float[Array, "M K"], num_terms: int, *, interpret: bool) -> tuple[Int8[Array, "C M K"], Float32[Array, "M"]]:
    """See `reference.quantize_rows`; rows that warpgroups cannot share evenly are left to XLA."""
    num_rows, num_inputs = x.shape
    warpgroups = num_warpgroups(num_inputs)
    if warpgroups is None:
        return reference.quantize_rows(x, num_terms)
    terms = jax.ShapeDtypeStruct((num_terms, num_rows, num_inputs), jnp.int8)
    run = mosaic.kernel(
        functools.partial(_kernel, num_terms=num_terms, part=num_inputs // warpgroups),
        interpret=interpret,
        out_type=(terms, jax.ShapeDtypeStruct((num_rows,), jnp.float32)),
        scratch_types=[plgpu.SMEM((warpgroups,), jnp.float32), plgpu.Barrier(num_arrivals=warpgroups)],
        grid=(num_rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name="quantize_rows",
    )
    return run(x)


def num_warpgroups(num_inputs: int) -> int | None:
    """How many share a row: as few as have room for it; None where no number does."""
    fitting = [n for n in range(1, MAX_WARPGROUPS + 1) if num_inputs % (n * LANES) == 0 and num_inputs <= n * MAX_PART]
    return fitting[0] if fitting else None


def _kernel(x: Any, terms: Any, scales: Any, largest_of: Any, has_largest: Any, *, num_terms: int, part: int) -> None:
    row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    sizes = [size for _, size in cut(part)]
    places = [pl.ds(warpgroup * part + start, size) for start, size in cut(part)]
    pieces = [_load(x.at[row, place], size) for place, size in zip(places, sizes, strict=True)]
    largest_of[warpgroup] = functools.reduce(jnp.maximum, [jnp.max(magnitudes(piece)) for piece in pieces])
    plgpu.barrier_arrive(has_largest)
    plgpu.barrier_wait(has_largest)
    largest = functools.reduce(jnp.maximum, [largest_of[other] for other in range(largest_of.shape[0])])
    # XLA too makes a product of a quotient by a constant.
    scale = jnp.where(largest > 0, largest * (np.float32(1) / np.float32(MAX_INT8)), 1.0)

    @pl.when(warpgroup == 0)
    def _() -> None:
        scales[row] = scale

    for piece, place in zip(pieces, places, strict=True):
        steps = piece.astype(jnp.float32) / scale
        first = round_steps(steps)
        terms[0, row, place] = first.astype(jnp.int8)
        if num_terms == 2:
            terms[1, row, place] = round_steps((steps - first) * RESIDUAL_STEPS).astype(jnp.int8)


def cut(part: int) -> list[tuple[int, int]]:
    """Where pieces begin and how long they are."""
    places, start = [], 0
    while start < part:
        places.append((start, next(size for size in PIECES if size <= part - start)))
        start += places[-1][1]
    return places


def _load(place: Any, size: int) -> Any:
    return plgpu.load(place, layout=plgpu.Layout.WG_STRIDED((size,), vec_size=size // LANES))


def magnitudes(piece: Any) -> Any:
    """Of a piece's elements, in float32."""
    return jnp.abs(piece.astype(jnp.float32))
