"""The packed product for tiles of rows, each with its own expert's matrix: the same thread blocks, which look up where theirs lies.

It is no implementation of an operation: elsewhere a grouped product of packed matrices is one `packed_matmul` for each tile.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common import mosaic
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.packed_matmul.matrix import PackedMatrix
from pallas_kernels.packed_matmul.mosaic import call, kernel, unpack
from pallas_kernels.packed_matmul.mosaic.config import BLOCK_ROWS, COPY_BYTES, Config, Problem, pick_config
from pallas_kernels.packed_matmul.mosaic.plan import Plan

MAX_ROWS, MAX_ROWS_OF_MANY_LEVELS = 64, 32
"""Of a thread block. Offsets or zero points beside scales take registers that more rows would need."""


def grouped_packed_matmul(
    x: Float[Array, "A U K"],
    matrices: PackedMatrix,
    tile_expert: Int32[Array, "A"],
    *,
    interpret: bool = False,
    config: Config | None = None,
) -> Float32[Array, "A U N"]:
    """x[a] @ matrices[tile_expert[a]].T for every tile a, summed in float32; see `packed_matmul` and `grouped_matmul`.

    Args:
        x: A tiles of U rows.
        matrices: a stack of X, with one axis more in front of every array.
        tile_expert: the matrix of each tile; X for a tile that is empty, whose result is zero.
        interpret: where there is no Hopper GPU, run in Pallas' GPU interpreter instead of refusing.
        config: instead of the one that is picked.

    Raises:
        UnsupportedByKernel: no Hopper GPU; activations other than bfloat16; a format or sizes that it does not take.
    """
    num_tiles, tile_rows, num_inputs = x.shape
    matrix = jax.eval_shape(lambda stack: jax.tree.map(lambda leaf: leaf[0], stack), matrices)
    call.refuse_format(x, matrix)
    num_outputs = matrix.shape[0]
    if tile_rows % 8 or tile_rows & (tile_rows - 1):
        raise UnsupportedByKernel(f"rows of a tile must be a power of two from 8 on, got {tile_rows}")
    if num_outputs % 8:
        raise UnsupportedByKernel(f"outputs must be a multiple of 8, got {num_outputs}")
    config = config or pick_grouped(tile_rows, matrix, mosaic.device())
    plan = call.make_plan(matrix, config)
    run = mosaic.kernel(
        functools.partial(_thread_block, plan=plan, tile_rows=tile_rows),
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((1, num_tiles * tile_rows, num_outputs), jnp.float32),
        scratch_types={"scratch": plan.scratch()},
        # Blocks that follow each other read the same activations, and the next tile's, of the same expert, the same codes.
        grid=(num_tiles * tile_rows // config.tile_m, pl.cdiv(num_outputs, config.tile_n), 1),
        grid_names=("m", "n", "span"),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"grouped_packed_matmul_w{matrix.bits}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
    )
    levels = {name: _aligned(getattr(matrices, name)) for name in plan.levels}
    rows = unpack.in_order(x.reshape(num_tiles * tile_rows, num_inputs), matrix.bits)
    total = run(rows, _words(matrices.codes), levels, tile_expert.astype(jnp.int32)).reshape(num_tiles, tile_rows, num_outputs)
    if plan.group:
        return total
    scales = matrices.scales[:, :, 0].astype(jnp.float32) * plan.factor
    return total * scales.at[tile_expert].get(mode="clip")[:, None, :]


def pick_grouped(tile_rows: int, matrix: PackedMatrix, device: mosaic.Device) -> Config:
    """As for one matrix and so many rows, but not cut along the inputs: experts and outputs are blocks enough.

    Raises:
        UnsupportedByKernel: a row that cannot be cut into stages.
    """
    problem = Problem(
        num_rows=tile_rows,
        num_outputs=matrix.shape[0],
        num_inputs=matrix.shape[1],
        bits=matrix.bits,
        group_size=matrix.group_size,
        num_levels=sum(getattr(matrix, name) is not None for name in ("scales", "super_scales", "offsets", "super_offsets", "zeros")),
    )
    most = MAX_ROWS if problem.num_levels == 1 else MAX_ROWS_OF_MANY_LEVELS
    config = pick_config(replace(problem, num_rows=min(most, tile_rows)), device)
    return replace(config, tile_m=min(most, tile_rows), num_spans=1, splits=True)


def _thread_block(
    x: Any, words: Any, levels: dict[str, Any], tile_expert: Any, out: Any, scratch: dict[str, Any], *, plan: Plan, tile_rows: int
) -> None:
    expert = expert_of(tile_expert, lax.div(lax.axis_index("m"), tile_rows // plan.config.tile_m))
    is_used = expert < words.shape[0]

    @pl.when(is_used)
    def _() -> None:
        of_expert = {name: numbers.at[expert] for name, numbers in levels.items()}
        kernel.body(x, words.at[expert], of_expert, out, scratch, plan=plan)

    @pl.when(jnp.logical_not(is_used) & (lax.axis_index("warpgroup") < plan.config.num_warpgroups))
    def _() -> None:
        zeros = plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, plan.config.tile_m), jnp.float32), kernel.LAYOUT)
        block = kernel.Block(plan=plan, x=x, words=None, levels={}, out=out, scratch=scratch, first_tile=0)
        block.store((zeros,) * plan.config.row_blocks)


def expert_of(tile_expert: Any, tile: Any) -> Any:
    """The expert of a tile."""
    return tile_expert[tile]


def _words(codes: Array) -> Array:
    """uint16 [X N W] of the same bytes."""
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:2], -1, 2), jnp.uint16)


def _aligned(numbers: Array) -> Array:
    """Rows of whole 16 bytes; what is added is read by nobody."""
    missing = -numbers.shape[2] % (COPY_BYTES // numbers.dtype.itemsize)
    return jnp.pad(numbers, ((0, 0), (0, 0), (0, missing))) if missing else numbers
