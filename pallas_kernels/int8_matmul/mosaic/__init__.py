"""The int8 product on Hopper: `wgmma` on int8, with scales, bias and activation in the same kernel.

What XLA (jax 0.11.2) compiles the same to for an H200, counted in its program: three kernels round the rows and read x twice; a Triton
product writes float32 results, or with few rows eight int32 sums of each; one more kernel reads them back and scales. For 4096 rows, outputs
and inputs, bfloat16 at both ends, that is 285 MB where 84 have to be moved, and 117 are here; for 16 rows 21.5 MB, 17 and 17. To round x inside
the product would copy it to every tile of outputs in twice the bytes; to round it where the layer's norm is computed would save a bfloat16
x written and read, 67 MB of 420 in the prefill's largest product, which is bound by arithmetic, and nothing that can be measured in decode.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels.common import mosaic
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.int8_matmul.mosaic.body import Plan, memory, thread_block
from pallas_kernels.int8_matmul.mosaic.config import CANDIDATES, OUTPUTS, Config, Shape, pick_config, refusal
from pallas_kernels.int8_matmul.mosaic.quantize import quantize_rows

__all__ = ["CANDIDATES", "Config", "Shape", "int8_matmul", "pick_config"]

SWIZZLES = (128, 64, 32)
"""Inputs that lie together in shared memory."""
ROWS = 8
"""Rows of a swizzled tile: copies take whole ones, or what there is of the only one."""


def int8_matmul(
    x: Float[Array, "M K"],
    weight: Int8[Array, "N K"],
    weight_scale: Float32[Array, "N"],
    *,
    num_terms: int = 1,
    bias: Float[Array, "N"] | None = None,
    activation: str | None = None,
    out_dtype: Any = jnp.float32,
    interpret: bool = False,
    config: Config | None = None,
) -> Float[Array, "M N"]:
    """See `api.int8_matmul`: one kernel rounds the rows, another multiplies.

    Args:
        interpret: where there is no Hopper GPU, run in Pallas' GPU interpreter instead of refusing.
        config: instead of the one that is picked.

    Raises:
        UnsupportedByKernel: no Hopper GPU, or sizes that its copies cannot take.
    """
    (num_rows, num_inputs), num_outputs, result_bytes = x.shape, weight.shape[0], jnp.dtype(out_dtype).itemsize
    shape = Shape(num_rows=num_rows, num_outputs=num_outputs, num_inputs=num_inputs, num_terms=num_terms, result_bytes=result_bytes)
    swizzle = swizzle_of(shape)
    config = config or pick_config(shape, mosaic.device())
    if reason := refusal(config, shape):
        raise UnsupportedByKernel(reason)
    plan = Plan(
        num_terms=num_terms,
        tile_rows=config.tile_columns // num_terms,
        tile_k=config.tile_k,
        num_steps=pl.cdiv(shape.num_inputs, config.tile_k),
        num_consumers=config.num_consumers,
        num_stages=config.num_stages,
        num_splits=config.num_splits,
        swizzle=swizzle,
        activation=activation,
        bias_dtype=None if bias is None else bias.dtype,
        out_dtype=jnp.dtype(out_dtype),
    )
    terms, row_scale = quantize_rows(x, num_terms, interpret=interpret)
    inputs = {"terms": terms, "weight": weight, "row_scale": row_scale, "weight_scale": weight_scale}
    return _launch(inputs if bias is None else inputs | {"bias": bias}, plan, interpret=interpret)


def swizzle_of(shape: Shape) -> int:
    """Bytes of a row that lie together in shared memory: the most that divide it.

    Raises:
        UnsupportedByKernel: sizes that copies cannot take in place.
    """
    fitting = [size for size in SWIZZLES if shape.num_inputs % size == 0]
    if not fitting:
        raise UnsupportedByKernel(f"inputs must be a multiple of {SWIZZLES[-1]}, got {shape.num_inputs}")
    if shape.num_outputs % ROWS and shape.num_outputs > ROWS:
        raise UnsupportedByKernel(f"outputs must be a multiple of {ROWS}, got {shape.num_outputs}")
    return fitting[0]


def _launch(inputs: dict[str, Array], plan: Plan, *, interpret: bool) -> Float[Array, "M N"]:
    """Where rows are no whole tiles of 8 and outputs none of 64, what is copied is padded and the result is cut."""
    (_, num_rows, _), (num_outputs, _) = inputs["terms"].shape, inputs["weight"].shape
    padded_rows = num_rows if num_rows <= ROWS else ROWS * pl.cdiv(num_rows, ROWS)
    if padded_rows > num_rows:
        inputs = inputs | {"terms": jnp.pad(inputs["terms"], ((0, 0), (0, padded_rows - num_rows), (0, 0)))}
    row_tiles, output_tiles = pl.cdiv(num_rows, plan.tile_rows), pl.cdiv(num_outputs, plan.tile_outputs)
    is_split = plan.num_splits > 1
    out_type = [jax.ShapeDtypeStruct((padded_rows, OUTPUTS * pl.cdiv(num_outputs, OUTPUTS)), plan.out_dtype)]
    if is_split:
        sums = (plan.num_splits - 1, row_tiles, output_tiles * plan.num_consumers, plan.columns, OUTPUTS)
        out_type.append(jax.ShapeDtypeStruct(sums, jnp.int32))
    held = memory(plan)

    def run(inputs: dict[str, Any], *refs: Any) -> None:
        output, *sums = refs[: len(out_type)]
        thread_block(inputs, output, *sums, plan=plan, **dict(zip(held, refs[len(out_type) :], strict=True)))

    results = mosaic.kernel(
        run,
        interpret=interpret,
        out_type=out_type,
        scratch_types=list(held.values()),
        grid=(output_tiles, row_tiles),  # blocks that follow each other share a tile of the weight
        grid_names=("outputs", "rows"),
        cluster=(plan.num_splits,) if is_split else (),
        cluster_names=("split",) if is_split else (),
        num_threads=plan.num_consumers + 1,
        thread_name="warpgroup",
        kernel_name="int8_matmul",
    )(inputs)
    return results[0][:num_rows, :num_outputs]
