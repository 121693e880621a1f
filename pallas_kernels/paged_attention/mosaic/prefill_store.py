"""Output of the prefill kernel: a tile's own tokens are written and no neighbour's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic.query_tiles import TOKENS, Span, spans

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.mosaic.prefill_kernel import Options, Shared, Tile


def store(output: Any, shared: Shared, options: Options, tile: Tile, result: jax.Array, warpgroup: Any) -> None:
    """Start to write this warpgroup's part of a tile's output, [64, columns] in registers, to `output` [T, H, columns or more].

    Tokens of a tile that has none but its row's go as boxes of one head's tokens each; else each token's head by itself, from rows that
    are not swizzled, which takes several times as long but is rare.
    """
    config = options.config
    boxes, rows = shared.places[-2:]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    # Now nobody reads the queries, and the output before this one has left.
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)
    group = 0 if config.splits_values else warpgroup
    columns = result.shape[1]
    own = pl.ds(pl.multiple_of(warpgroup * columns, columns), columns) if config.splits_values else pl.ds(0, columns)

    def store_boxes() -> None:
        boxes[group, :, own] = result
        plgpu.commit_smem()
        _for_spans(options, warpgroup, lambda span, own: _copy_box(output, boxes, options, tile, span, own), columns)

    def store_rows() -> None:
        rows[group, :, own] = result
        plgpu.commit_smem()
        _for_spans(options, warpgroup, lambda span, own: _copy_rows(output, rows, options, tile, span, own), columns)

    if output.shape[0] % TOKENS:  # the last box would have no end
        store_rows()
    else:
        lax.cond((tile.first_token == 0) & (tile.end_token == config.tile_tokens), store_boxes, store_rows)
    plgpu.commit_smem_to_gmem_group()


def _for_spans(options: Options, warpgroup: Any, copy: Any, columns: int) -> None:
    """Each warpgroup copies what it has written."""
    config = options.config
    for writer in range(2):

        @pl.when(warpgroup == writer)
        def _(writer: int = writer) -> None:
            start = writer * columns if config.splits_values else 0
            for span in spans(config.tile_tokens, config.tile_heads):
                if config.splits_values or span.warpgroup == writer:
                    copy(span, pl.ds(start, columns))


def _copy_box(output: Any, boxes: Any, options: Options, tile: Tile, span: Span, columns: Any) -> None:
    token, head = tile.token + span.token, tile.part * options.config.tile_heads + span.head
    source = boxes.at[span.warpgroup, pl.ds(span.row, span.length), columns]
    plgpu.copy_smem_to_gmem(source, output.at[pl.ds(token, span.length), head, columns], commit_group=False)


def _copy_rows(output: Any, rows: Any, options: Options, tile: Tile, span: Span, columns: Any) -> None:
    head = tile.part * options.config.tile_heads + span.head

    @pl.loop(jnp.clip(tile.first_token - span.token, 0, span.length), jnp.clip(tile.end_token - span.token, 0, span.length))
    def _(token: Any) -> None:
        source = rows.at[span.warpgroup, pl.ds(span.row + token, 1), columns]
        plgpu.copy_smem_to_gmem(source, output.at[pl.ds(tile.token + span.token + token, 1), head, columns], commit_group=False)
