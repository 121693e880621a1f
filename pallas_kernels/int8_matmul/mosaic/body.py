"""What the thread blocks of the int8 product do.

A thread block computes a tile of the transposed product: `wgmma` takes 64 rows at least of its left operand and any multiple of 8
of its right one, and weights are many where rows of x may be one. One warpgroup brings tiles of both operands through a ring of
stages in shared memory, each of the others multiplies 64 outputs of them. Where the tiles are fewer than the multiprocessors, the
blocks of a cluster share a tile, each with a part of the inputs: the sums are integers, so any split gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.activations import ACTIVATIONS
from pallas_kernels.int8_matmul.mosaic.config import CHUNK, OUTPUTS
from pallas_kernels.int8_matmul.reference import RESIDUAL_STEPS

MOVED_COLUMNS = 128
"""From so many on the producer's registers go to the consumers: their sums take half of what a thread has from the start."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Together, of three warpgroups, those of a multiprocessor."""
ATOM = 128
"""Bytes of a row that lie together in a swizzled tile, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One call's sizes.

    Attributes:
        tile_rows: rows of x of a tile, each of which comes in `num_terms` terms.
        num_steps: of `tile_k` inputs each, all splits together.
        swizzle: bytes of a row that lie together in shared memory; divides the number of inputs.
    """

    num_terms: int
    tile_rows: int
    tile_k: int
    num_steps: int
    num_consumers: int
    num_stages: int
    num_splits: int
    swizzle: int
    activation: str | None
    bias_dtype: Any
    out_dtype: Any

    @property
    def columns(self) -> int:
        """Columns of the transposed product: rows of x, every term of each."""
        return self.num_terms * self.tile_rows

    @property
    def moves_registers(self) -> bool:
        """Whether the producer gives registers to the consumers."""
        return self.num_consumers == 2 and self.columns >= MOVED_COLUMNS

    @property
    def tile_outputs(self) -> int:
        """Outputs of a thread block."""
        return OUTPUTS * self.num_consumers

    @property
    def chunk(self) -> int:
        """Columns that are stored at once, of one term."""
        return min(CHUNK, self.tile_rows)


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int = ATOM) -> Any:
    """Shared memory laid out for `wgmma` and for stores without bank conflicts."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)))


def memory(plan: Plan) -> dict[str, Any]:
    """Shared memory and barriers of a thread block."""
    stages, consumers = plan.num_stages, plan.num_consumers
    held = {
        "terms_tile": _tiled((stages, plan.columns, plan.tile_k), jnp.int8, plan.swizzle),
        "weight_tile": _tiled((stages, plan.tile_outputs, plan.tile_k), jnp.int8, plan.swizzle),
        "row_scale_tile": plgpu.SMEM((plan.tile_rows,), jnp.float32),
        "weight_scale_tile": plgpu.SMEM((plan.tile_outputs,), jnp.float32),
        "result_tile": _tiled((consumers, plan.chunk, OUTPUTS), plan.out_dtype),
        "is_filled": plgpu.Barrier(num_arrivals=plan.num_terms + 1, num_barriers=stages),
        "is_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        "has_vectors": plgpu.Barrier(num_arrivals=2 if plan.bias_dtype is None else 3),
    }
    if plan.bias_dtype is not None:
        held["bias_tile"] = plgpu.SMEM((plan.tile_outputs,), plan.bias_dtype)
    if plan.num_splits > 1:
        held["sums_tile"] = _tiled((consumers, plan.chunk, OUTPUTS), jnp.int32)
        held["has_sums"] = plgpu.Barrier(num_barriers=consumers)
        held["is_split_done"] = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=consumers)
    return held


def thread_block(inputs: Mapping[str, Any], output: Any, sums: Any = None, *, plan: Plan, **held: Any) -> None:
    """One thread block; `inputs` are terms [C M K], weight [N K], row_scale [M], weight_scale [N] and perhaps bias [N]."""
    warpgroup = lax.axis_index("warpgroup")
    split = lax.axis_index("split") if plan.num_splits > 1 else 0
    steps = pl.cdiv(plan.num_steps, plan.num_splits)
    first = split * steps
    num_steps = jnp.minimum(steps, plan.num_steps - first)
    at = (lax.axis_index("rows") * plan.tile_rows, lax.axis_index("outputs") * plan.tile_outputs)

    @pl.when(warpgroup == plan.num_consumers)
    def _producer() -> None:
        if plan.moves_registers:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        fetch_vectors(inputs, held, at, plan)

        @pl.loop(0, num_steps)
        def _step(step: Any) -> None:
            slot = slot_of(step, plan)

            @pl.when(step >= plan.num_stages)
            def _() -> None:
                wait_free(held, slot)

            fetch(inputs, held, at, first + step, slot, plan)

    @pl.when(warpgroup < plan.num_consumers)
    def _consumer() -> None:
        if plan.moves_registers:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        chunks = multiply(held, warpgroup, num_steps, plan)
        if plan.num_splits == 1:
            finish(chunks, output, held, warpgroup, at, plan)
            return
        hand_over(chunks, sums, held, warpgroup, split, plan)

        @pl.when(split == 0)
        def _() -> None:
            finish(merge(chunks, sums, held, warpgroup, plan), output, held, warpgroup, at, plan)


def slot_of(step: Any, plan: Plan) -> Any:
    """The stage of a step."""
    return lax.rem(step, jnp.int32(plan.num_stages))


def fetch_vectors(inputs: Mapping[str, Any], held: Mapping[str, Any], at: tuple[Any, Any], plan: Plan) -> None:
    """Start bringing in what the end needs."""
    row, output = at
    plgpu.copy_gmem_to_smem(inputs["row_scale"].at[pl.ds(row, plan.tile_rows)], held["row_scale_tile"], held["has_vectors"])
    for name in ("weight_scale", "bias") if plan.bias_dtype is not None else ("weight_scale",):
        plgpu.copy_gmem_to_smem(inputs[name].at[pl.ds(output, plan.tile_outputs)], held[f"{name}_tile"], held["has_vectors"])


def fetch(inputs: Mapping[str, Any], held: Mapping[str, Any], at: tuple[Any, Any], step: Any, slot: Any, plan: Plan) -> None:
    """Start bringing a step's operands into a stage; zeros come from beyond the edges."""
    row, output = at
    inner = pl.ds(step * plan.tile_k, plan.tile_k)
    arrival = held["is_filled"].at[slot]
    for term in range(plan.num_terms):
        place = held["terms_tile"].at[slot, pl.ds(term * plan.tile_rows, plan.tile_rows)]
        plgpu.copy_gmem_to_smem(inputs["terms"].at[term, pl.ds(row, plan.tile_rows), inner], place, arrival)
    plgpu.copy_gmem_to_smem(inputs["weight"].at[pl.ds(output, plan.tile_outputs), inner], held["weight_tile"].at[slot], arrival)


def multiply(held: Mapping[str, Any], warpgroup: Any, num_steps: Any, plan: Plan) -> list[Any]:
    """This warpgroup's part of the tile as far as this block's inputs go, in chunks, int32 [OUTPUTS chunk]."""

    def run(total: Any) -> Any:
        @pl.loop(0, num_steps)
        def _step(step: Any) -> None:
            slot = slot_of(step, plan)
            wait_filled(held, slot)
            weight = held["weight_tile"].at[slot, pl.ds(warpgroup * OUTPUTS, OUTPUTS)]
            plgpu.wgmma(total, weight, held["terms_tile"].at[slot].transpose((1, 0)))
            wait_products(1)

            # The stage of the product before is free; its last ones nobody waits for.
            @pl.when((step > 0) & (step - 1 + plan.num_stages < num_steps))
            def _() -> None:
                plgpu.barrier_arrive(held["is_free"].at[slot_of(step - 1, plan)])

        return total[...]

    total = pl.run_scoped(run, plgpu.ACC((OUTPUTS, plan.columns), jnp.int32))
    return [total[:, first : first + plan.chunk] for first in range(0, plan.columns, plan.chunk)]


def wait_filled(held: Mapping[str, Any], slot: Any) -> None:
    """Until a stage's operands are there."""
    plgpu.barrier_wait(held["is_filled"].at[slot])


def wait_free(held: Mapping[str, Any], slot: Any) -> None:
    """Until no warpgroup needs a stage's operands any more."""
    plgpu.barrier_wait(held["is_free"].at[slot])


def wait_products(num_left: int) -> None:
    """Until so many products are in flight: those before do not read their stages any more."""
    plgpu.wgmma_wait(num_left)


def wait_splits(held: Mapping[str, Any]) -> None:
    """Until all blocks of the cluster are here. None may leave before: the others' arrivals go to its memory."""
    plgpu.barrier_arrive(held["is_split_done"])
    plgpu.barrier_wait(held["is_split_done"])


def _sums_at(sums: Any, warpgroup: Any, split: Any, chunk: int, plan: Plan) -> Any:
    tile = lax.axis_index("outputs") * plan.num_consumers + warpgroup
    return sums.at[split - 1, lax.axis_index("rows"), tile, pl.ds(chunk * plan.chunk, plan.chunk)]


def hand_over(chunks: list[Any], sums: Any, held: Mapping[str, Any], warpgroup: Any, split: Any, plan: Plan) -> None:
    """Bring the sums of every block but the first to memory, and let no block go on before all have."""
    tile = held["sums_tile"].at[warpgroup]

    @pl.when(split > 0)
    def _() -> None:
        for index, chunk in enumerate(chunks):
            if index:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tile.transpose((1, 0))[...] = _turned(chunk)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, _sums_at(sums, warpgroup, split, index, plan))
        plgpu.wait_smem_to_gmem(0)

    wait_splits(held)


def merge(chunks: list[Any], sums: Any, held: Mapping[str, Any], warpgroup: Any, plan: Plan) -> list[Any]:
    """The first block's sums and all others'."""
    tile, arrival = held["sums_tile"].at[warpgroup], held["has_sums"].at[warpgroup]
    merged = []
    for index, chunk in enumerate(chunks):
        for split in range(1, plan.num_splits):
            plgpu.copy_gmem_to_smem(_sums_at(sums, warpgroup, split, index, plan), tile, arrival)
            plgpu.barrier_wait(arrival)
            other = plgpu.load(tile.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
            chunk = chunk + plgpu.layout_cast(other, plgpu.Layout.WGMMA)
            plgpu.commit_smem()  # what was read is about to be overwritten by a copy
        merged.append(chunk)
    return merged


def finish(chunks: list[Any], output: Any, held: Mapping[str, Any], warpgroup: Any, at: tuple[Any, Any], plan: Plan) -> None:
    """Scale, add the bias, apply the activation and store, a chunk of rows after the other."""
    plgpu.barrier_wait(held["has_vectors"])
    row, first_output = at
    mine = pl.ds(warpgroup * OUTPUTS, OUTPUTS)
    weight_scale = _per_output(held["weight_scale_tile"][mine])
    bias = None if plan.bias_dtype is None else _per_output(held["bias_tile"][mine]).astype(jnp.float32)
    result_tile = held["result_tile"].at[warpgroup]
    shape = (OUTPUTS, plan.chunk)
    chunks_of_term = plan.tile_rows // plan.chunk
    for index in range(chunks_of_term):
        start = index * plan.chunk
        result = combine([chunk.astype(jnp.float32) for chunk in chunks[index::chunks_of_term]])
        row_scale = plgpu.layout_cast(held["row_scale_tile"][pl.ds(start, plan.chunk)], plgpu.Layout.WGMMA.reduce(0))
        result = result * lax.broadcast_in_dim(row_scale, shape, [1]) * lax.broadcast_in_dim(weight_scale, shape, [0])
        if bias is not None:
            result = result + lax.broadcast_in_dim(bias, shape, [0])
        if plan.activation is not None:
            result = ACTIVATIONS[plan.activation](result)
        if start:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        result_tile.transpose((1, 0))[...] = _turned(result.astype(plan.out_dtype))
        plgpu.commit_smem()
        place = output.at[pl.ds(row + start, plan.chunk), pl.ds(first_output + warpgroup * OUTPUTS, OUTPUTS)]
        plgpu.copy_smem_to_gmem(result_tile, place)
    plgpu.wait_smem_to_gmem(0)


def combine(terms: list[Any]) -> Any:
    """The terms of a product; XLA too makes a product of a quotient by a constant."""
    return terms[0] if len(terms) == 1 else terms[0] + terms[1] * (np.float32(1) / np.float32(RESIDUAL_STEPS))


def _per_output(vector: Any) -> Any:
    return plgpu.layout_cast(vector, plgpu.Layout.WGMMA.reduce(1))


def _turned(tile: Any) -> Any:
    """In registers as its transpose is stored without bank conflicts."""
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
