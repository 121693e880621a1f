"""The partial results of split rows added up in float32, in the order of the splits."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.common import mosaic
from pallas_kernels.paged_attention.mosaic import tiles

BY_HEAD = plgpu.Layout.WGMMA.reduce(0)
BLOCKS_PER_CORE = 4
MAX_SLOTS = 4
SLOT_BYTES = 32768


def merge(
    merges: Int32[Array, "I 3"], partial: Any, statistics: Any, output: Any, tile_heads: int, live_heads: int, *, interpret: bool
) -> None:
    """Write the outputs of the items that have more than one entry.

    Args:
        merges: `splits.Work.merges`.
        partial: reference to weighted values [entries, parts, live_heads, columns], relative to each entry's highest logit.
        statistics: reference to [entries, parts, 2, tile_heads]: highest logits and sums of weights.
        output: mutable reference to [T, H, columns].
    """
    columns = partial.shape[3]
    num_slots = max(1, min(MAX_SLOTS, SLOT_BYTES // (tile_heads * columns * 4)))
    num_blocks = min(merges.shape[0] * partial.shape[1], mosaic.device().num_cores * BLOCKS_PER_CORE)
    body = functools.partial(_kernel, num_blocks=num_blocks, live_heads=live_heads)
    mosaic.kernel(
        body,
        interpret=interpret,
        out_type=(),
        grid=(num_blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((num_slots, tile_heads, columns), jnp.float32),
            plgpu.SMEM((num_slots, tile_heads), jnp.float32),
            plgpu.SMEM((num_slots, tile_heads), jnp.float32),
            plgpu.SMEM((tile_heads, columns), output.dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=num_slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention_merge",
    )(merges, partial, statistics, output)


def _kernel(merges: Any, partial: Any, statistics: Any, output: Any, *scratch: Any, num_blocks: int, live_heads: int) -> None:
    part_stage, highest_stage, total_stage, output_stage, full = scratch
    num_slots, heads, columns = part_stage.shape
    num_parts = partial.shape[1]
    block = lax.axis_index("block")
    num_turns = lax.div(merges.shape[0] * num_parts - block + (num_blocks - 1), jnp.int32(num_blocks))

    def merge_item(turn: Any) -> None:
        index = block + turn * num_blocks
        item, part = lax.div(index, jnp.int32(num_parts)), lax.rem(index, jnp.int32(num_parts))
        token, first_entry, num_entries = (merges[item, field] for field in range(3))

        def fetch(split: Any) -> None:
            slot = lax.rem(split, jnp.int32(num_slots))
            entry = first_entry + split
            plgpu.copy_gmem_to_smem(partial.at[entry, part], part_stage.at[slot, pl.ds(0, live_heads)], full.at[slot])
            tiles.copy_contiguous(statistics.at[entry, part, 0], highest_stage.at[slot], full.at[slot])
            tiles.copy_contiguous(statistics.at[entry, part, 1], total_stage.at[slot], full.at[slot])

        def add(split: Any, carry: Any) -> Any:
            slot = lax.rem(split, jnp.int32(num_slots))
            plgpu.barrier_wait(full.at[slot])
            carry = _add(part_stage.at[slot], highest_stage.at[slot], total_stage.at[slot], *carry)
            plgpu.commit_smem()
            pl.when(split + num_slots < num_entries)(lambda: fetch(split + num_slots))
            return carry

        @pl.when(num_entries > 1)
        def _() -> None:
            for split in range(num_slots):
                pl.when(split < num_entries)(lambda split=split: fetch(jnp.int32(split)))
            highest = plgpu.layout_cast(jnp.full((heads,), tiles.MASKED, jnp.float32), BY_HEAD)
            total = plgpu.layout_cast(jnp.zeros((heads,), jnp.float32), BY_HEAD)
            weighted = plgpu.layout_cast(jnp.zeros((columns, heads), jnp.float32), plgpu.Layout.WGMMA)
            highest, total, weighted = lax.fori_loop(0, num_entries, add, (highest, total, weighted))
            finish_output(output, output_stage, token, part, live_heads, total, weighted)

    pl.loop(0, num_turns)(merge_item)


def _add(part_ref: Any, highest_ref: Any, total_ref: Any, highest: Any, total: Any, weighted: Any) -> Any:
    """One more partial result, weighed by 2 ** (its highest logit - the highest of all)."""
    part_highest = plgpu.load(highest_ref, layout=BY_HEAD, optimized=False)
    part_total = plgpu.load(total_ref, layout=BY_HEAD, optimized=False)
    part = plgpu.load(part_ref.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    part = plgpu.layout_cast(part, plgpu.Layout.WGMMA)
    new_highest = jnp.maximum(highest, part_highest)
    keep, weight = jnp.exp2(highest - new_highest), jnp.exp2(part_highest - new_highest)
    weighted = weighted * tiles.along(keep, weighted.shape, 1) + part * tiles.along(weight, weighted.shape, 1)
    return new_highest, total * keep + part_total * weight, weighted


def finish_output(output: Any, stage: Any, token: Any, part: Any, live_heads: int, total: Any, weighted: Any) -> None:
    """Write weighted / total, [columns, tile_heads], to the heads of a part of a token; zeros where nothing was seen."""
    factor = 1 / jnp.where(total > 0, total, 1.0)
    result = (weighted * tiles.along(factor, weighted.shape, 1)).astype(stage.dtype)
    stage.transpose((1, 0))[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage.at[pl.ds(0, live_heads)], output.at[token, pl.ds(part * live_heads, live_heads)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
