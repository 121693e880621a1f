"""From a `PackedMatrix` to the kernel and back."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.common import mosaic
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.packed_matmul.matrix import PackedMatrix
from pallas_kernels.packed_matmul.mosaic import kernel, unpack
from pallas_kernels.packed_matmul.mosaic.config import COPY_BYTES, MAX_GROUP, Config, Problem, pick_config
from pallas_kernels.packed_matmul.mosaic.plan import Level, Plan

LEVELS = ("scales", "super_scales", "offsets", "super_offsets", "zeros")
GROUPS = (32, 64, 128, 256, 512)
SCALE_DTYPES = ("float16", "bfloat16", "float32", "uint8", "int8")
FP4_QUADRUPLED = np.array([0, 2, 4, 6, 8, 12, 16, 24], np.float32)
"""4 times the values of e2m1 without sign."""
MAX_ZERO = 128
"""Differences of a byte and a zero point up to this have at most 8 bits, as have the sums on the way."""


def packed_matmul(
    x: Float[Array, "M K"], matrix: PackedMatrix, *, interpret: bool = False, config: Config | None = None
) -> Float32[Array, "M N"]:
    """See `api.packed_matmul`. Products of bfloat16 activations and exact codes, summed in float32 and scaled in float32.

    A row of the result has the same bits whatever the other rows are.

    Raises:
        UnsupportedByKernel: no Hopper GPU; activations other than bfloat16; a format or sizes that it does not take.
    """
    refuse_format(x, matrix)
    num_outputs = matrix.shape[0]
    config = config or pick_config(problem_of(x.shape[0], matrix), mosaic.device())
    plan = make_plan(matrix, config)
    # TMA wants rows of whole 16 bytes; more columns than there are rows of the matrix are cut off again.
    num_columns = num_outputs if num_outputs % 4 == 0 else -(-num_outputs // config.tile_n) * config.tile_n
    spans = config.num_spans if config.splits else 1
    run = mosaic.kernel(
        functools.partial(kernel.body, plan=plan),
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((spans, x.shape[0], num_columns), jnp.float32),
        scratch_types={"scratch": plan.scratch()},
        grid=(pl.cdiv(num_outputs, config.tile_n), pl.cdiv(x.shape[0], config.tile_m), spans),
        grid_names=("n", "m", "span"),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"packed_matmul_w{matrix.bits}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
    )
    levels = {name: _aligned(getattr(matrix, name)) for name in plan.levels}
    parts = run(unpack.in_order(x, matrix.bits), _words(matrix.codes), levels)
    total = functools.reduce(lambda sums, part: sums + part, [parts[i] for i in range(spans)])[:, :num_outputs]
    return total if plan.group else total * (matrix.scales.astype(jnp.float32)[:, 0] * np.float32(plan.factor))[None, :]


def refuse_format(x: Array, matrix: PackedMatrix) -> None:
    """Raise UnsupportedByKernel for what the kernel does not take."""
    if x.dtype != jnp.bfloat16:
        raise UnsupportedByKernel(f"activations must be bfloat16, got {x.dtype}")
    if matrix.bits not in (4, 8):
        raise UnsupportedByKernel(f"codes must have 4 or 8 bits, got {matrix.bits}")
    if matrix.group_size not in (0, *GROUPS):
        raise UnsupportedByKernel(f"groups must be {', '.join(map(str, GROUPS))} or the whole row, got {matrix.group_size}")
    is_two_levels = matrix.super_scales is not None
    for name in ("scales", "offsets", "super_scales", "super_offsets"):
        array = getattr(matrix, name)
        if array is not None and str(array.dtype) not in SCALE_DTYPES:
            raise UnsupportedByKernel(f"{name} must be {', '.join(SCALE_DTYPES)}, got {array.dtype}")
    if matrix.group_size == 0 and (matrix.offsets is not None or matrix.zeros is not None or is_two_levels):
        raise UnsupportedByKernel("a whole row may have one scale, and no offset or zero point of its own")
    if is_two_levels and matrix.offsets is not None and matrix.super_offsets is None:
        raise UnsupportedByKernel("offsets must have two levels where scales have")
    is_unsigned = matrix.codes.dtype == jnp.uint8 and matrix.codebook is None
    if not is_unsigned and (matrix.zero or matrix.zeros is not None):
        raise UnsupportedByKernel("signed codes and floats may have no zero point")
    if not 0 <= matrix.zero <= MAX_ZERO:
        raise UnsupportedByKernel(f"the zero point must be between 0 and {MAX_ZERO}, got {matrix.zero}")


def problem_of(num_rows: int, matrix: PackedMatrix) -> Problem:
    """The sizes of the product of so many rows with a matrix."""
    num_outputs, num_inputs = matrix.shape
    num_levels = sum(getattr(matrix, name) is not None for name in LEVELS)
    sizes = {"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs}
    has_offsets = matrix.offsets is not None
    return Problem(**sizes, bits=matrix.bits, group_size=matrix.group_size, num_levels=num_levels, has_offsets=has_offsets)


def make_plan(matrix: PackedMatrix, config: Config) -> Plan:
    """What is static.

    Raises:
        UnsupportedByKernel: codes that no formula is known for; sizes that are no whole stages.
    """
    num_inputs, tile_k = matrix.shape[1], config.tile_k(matrix.bits)
    levels = {}
    if matrix.group_size:
        for name in LEVELS:
            if (array := getattr(matrix, name)) is not None:
                levels[name] = Level.of(array.dtype, num_inputs // array.shape[1], tile_k, config.num_stages)
    group = min(matrix.group_size, MAX_GROUP)
    if group and tile_k % group:
        raise UnsupportedByKernel(f"stages of {tile_k} codes must be whole groups of {group}")
    if num_inputs % (tile_k * config.num_spans):
        raise UnsupportedByKernel(f"{config.num_spans} spans of whole stages of {tile_k} codes do not make {num_inputs}")
    for name, level in levels.items():
        if level.width * level.group % tile_k:
            raise UnsupportedByKernel(f"{level.width} {name} for {level.group} codes each are no whole stages of {tile_k}")
    formula, factor = _formula(matrix)
    return Plan(
        config=config,
        unpack=formula,
        bits=matrix.bits,
        num_inputs=num_inputs,
        group=group,
        zero=matrix.zero,
        factor=factor,
        levels=levels,
    )


def _formula(matrix: PackedMatrix) -> tuple[unpack.Unpack, float]:
    """How codes become numbers, and what those are to be multiplied by."""
    if matrix.bits == 8:
        formulas = {"int8": (unpack.signed8, 1.0), "uint8": (unpack.unsigned8, 1.0), "float8_e4m3fn": (unpack.e4m3, 2.0**-8)}
        if str(matrix.codes.dtype) not in formulas:
            raise UnsupportedByKernel(f"codes must be {', '.join(formulas)}, got {matrix.codes.dtype}")
        return formulas[str(matrix.codes.dtype)]
    if matrix.codebook is None:
        return unpack.unsigned4, 1.0
    values = np.asarray(matrix.codebook, np.float32)
    factor = float(values[1]) / float(FP4_QUADRUPLED[1])
    signs = np.repeat(np.array([1, -1], np.float32), len(FP4_QUADRUPLED))
    if not (values == factor * signs * np.tile(FP4_QUADRUPLED, 2)).all() or math.frexp(factor)[0] != 0.5:
        raise UnsupportedByKernel("the only codebook is e2m1 times a power of two")
    return unpack.e2m1, factor


def _words(codes: Any) -> Any:
    """uint16 [N W] of the same bytes; XLA moves none."""
    return lax.bitcast_convert_type(codes.reshape(codes.shape[0], -1, 2), jnp.uint16)


def _aligned(numbers: Any) -> Any:
    """Rows of whole 16 bytes. Those of most matrices are; what is added is read by nobody."""
    multiple = COPY_BYTES // numbers.dtype.itemsize
    missing = -numbers.shape[1] % multiple
    return jnp.pad(numbers, ((0, 0), (0, missing))) if missing else numbers
