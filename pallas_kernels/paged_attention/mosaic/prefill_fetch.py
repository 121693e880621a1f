"""The fetching warpgroup of the prefill kernel: queries, and tiles of keys and values as operands of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic import tiles
from pallas_kernels.paged_attention.mosaic.query_tiles import spans

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.mosaic.prefill_kernel import Global, Operand, Options, Shared, Tile


BYTES_AT_ONCE = 64
"""Of 64 rows, how many columns of one-byte numbers are in registers together."""


def fetch_all(memory: Global, shared: Shared, options: Options, num_turns: Any, tile_of: Callable[[Any], Tile]) -> None:
    """The queries, keys and values of every query tile, as fast as their places get free."""
    config = options.config
    plgpu.set_max_registers(config.fetch_registers, action="decrease")
    fetch_keys = _fetch_widened if options.cache.has_scales else _fetch_whole

    def fetch_tile(turn: Any, num_fetched: Any) -> Any:
        tile = tile_of(turn)
        plgpu.barrier_wait(shared.query_free)
        _fetch_queries(memory, shared, options, tile)
        return fetch_keys(memory, shared, options, tile, num_fetched)

    lax.fori_loop(0, num_turns, fetch_tile, jnp.int32(0))
    # Nothing may be on its way to shared memory when a thread block ends.
    plgpu.barrier_wait(shared.query_free)
    for operand in (shared.keys, shared.values):
        if operand is not None:
            for slot in range(config.num_stages):
                await_free(operand, slot)


def await_free(operand: Operand, slot: Any) -> None:
    """Wait until what was in a stage has been read."""
    plgpu.barrier_wait(operand.free.at[slot])


def _fetch_queries(memory: Global, shared: Shared, options: Options, tile: Tile) -> None:
    config = options.config
    queries = shared.places[0] if config.output_in_queries else shared.queries
    for span in spans(config.tile_tokens, config.tile_heads):
        source = memory.queries.at[pl.ds(tile.token + span.token, span.length), tile.part * config.tile_heads + span.head]
        plgpu.copy_gmem_to_smem(source, queries.at[span.warpgroup, pl.ds(span.row, span.length)], shared.query_full)


def _place(options: Options, tile: Tile) -> tiles.Place:
    """Whose keys a query tile reads."""
    parts_per_head = options.num_parts // options.cache.num_kv_heads
    return tiles.Place(lax.div(tile.part, jnp.int32(parts_per_head)), tile.first_key, tile.end_key)


# ---- bfloat16 ----------------------------------------------------------------------------------------------------------


def _fetch_whole(memory: Global, shared: Shared, options: Options, tile: Tile, num_fetched: Any) -> Any:
    """Straight from the pools to where they are read."""
    cache, config, pools = options.cache, options.config, memory.pools

    def fetch(number: Any, num_fetched: Any) -> Any:
        blocks = tiles.tile_blocks(cache, memory.tables, tile.row, number, config.tile_keys)
        slot = lax.rem(num_fetched, jnp.int32(config.num_stages))

        def copy(values: bool, full: Any) -> None:
            held = shared.values.vectors if values and shared.values is not None else None
            stages = tiles.Stages(shared.keys.vectors, held, None, None, full, None)
            source = tiles.Pools(None, pools.values, None, None) if values else tiles.Pools(pools.keys, None, None, None)
            tiles.fetch_tile(cache, source, blocks, _place(options, tile), number, stages, slot)

        for operand in (shared.keys, shared.values):
            if operand is None:
                continue
            await_free(operand, slot)
            is_values = operand is shared.values
            if not is_values and not cache.is_latent:
                copy(False, operand.full)
            else:
                _fetch_clear(lambda full, is_values=is_values: copy(is_values, full), shared, operand, options, tile, number, slot)
        return num_fetched + 1

    return lax.fori_loop(tile.first_tile, tile.end_tile, fetch, num_fetched)


def _fetch_clear(
    copy: Callable[[Any], None], shared: Shared, operand: Operand, options: Options, tile: Tile, number: Any, slot: Any
) -> None:
    """Fetch values, and zero what no query may read before anyone does: it may be NaN, and zero times NaN is NaN."""
    config = options.config
    first = number * config.tile_keys
    is_ragged = (first < tile.first_key) | (first + config.tile_keys > tile.end_key)

    def copy_and_clear() -> None:
        copy(shared.landed)
        plgpu.barrier_wait(shared.landed.at[slot])
        tiles.clear_unseen(operand.vectors.at[slot], number, config.tile_keys, tile.first_key, tile.end_key)
        for _ in range(config.tile_keys // min(config.tile_keys, options.cache.block_size)):
            plgpu.barrier_arrive(operand.full.at[slot])

    lax.cond(is_ragged, copy_and_clear, lambda: copy(operand.full))


# ---- one-byte numbers --------------------------------------------------------------------------------------------------


def _fetch_widened(memory: Global, shared: Shared, options: Options, tile: Tile, num_fetched: Any) -> Any:
    """From the pools to stages of their own, and from there, as bfloat16, to where they are read."""
    config, raw = options.config, shared.raw
    assert raw is not None, "one-byte pools have stages of their own"
    ahead = config.num_raw_stages

    def fetch(number: Any, num_fetched: Any, raw: tiles.Stages = raw) -> None:
        pl.when(number < tile.end_tile)(lambda: _fetch_raw(memory, raw, options, tile, number, lax.rem(num_fetched, jnp.int32(ahead))))

    def widen(number: Any, num_fetched: Any) -> Any:
        raw_slot, slot = lax.rem(num_fetched, jnp.int32(ahead)), lax.rem(num_fetched, jnp.int32(config.num_stages))
        plgpu.barrier_wait(raw.full.at[raw_slot])
        for operand, vectors, scales in ((shared.keys, raw.keys, raw.key_scales), (shared.values, raw.values, raw.value_scales)):
            if operand is not None:
                await_free(operand, slot)
                _widen(operand, vectors.at[raw_slot], scales.at[raw_slot], options, tile, number, slot)
                plgpu.commit_smem()
                plgpu.barrier_arrive(operand.full.at[slot])
        fetch(number + ahead, num_fetched + ahead)
        return num_fetched + 1

    for place in range(ahead):
        fetch(tile.first_tile + place, num_fetched + place)
    return lax.fori_loop(tile.first_tile, tile.end_tile, widen, num_fetched)


def _fetch_raw(memory: Global, raw: tiles.Stages, options: Options, tile: Tile, number: Any, slot: Any) -> None:
    cache, pools = options.cache, memory.pools
    run = min(options.config.tile_keys, cache.block_size)
    blocks = tiles.tile_blocks(cache, memory.tables, tile.row, number, options.config.tile_keys)
    place = _place(options, tile)
    tiles.fetch_tile(cache, pools._replace(key_scales=None, value_scales=None), blocks, place, number, raw, slot)
    for index, block in enumerate(blocks):
        start = number * options.config.tile_keys + index * run
        offset = lax.rem(start, jnp.int32(cache.block_size)) if run < cache.block_size else 0
        for pool, stage in ((pools.key_scales, raw.key_scales), (pools.value_scales, raw.value_scales)):
            if pool is not None:
                # All of them: there are scales at the ids of any blocks, and those of others are not used.
                plgpu.copy_gmem_to_smem(
                    pool.at[place.head, block, pl.ds(offset, run)], stage.at[slot, index, pl.ds(0, run)], raw.full.at[slot]
                )


def _widen(operand: Operand, raw: Any, raw_scales: Any, options: Options, tile: Tile, number: Any, slot: Any) -> None:
    """One tile; what no query may read becomes zero, as do its scales."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    first = number * options.config.tile_keys
    run = min(options.config.tile_keys, options.cache.block_size)
    for index in range(raw_scales.shape[0]):
        scales = plgpu.load(raw_scales.at[index, pl.ds(0, run)], layout=layout, optimized=False)
        position = plgpu.broadcasted_iota(jnp.int32, (run,), 0, layout=layout) + (first + index * run)
        is_readable = (position >= tile.first_key) & (position < tile.end_key)
        operand.scales.at[slot, pl.ds(index * run, run)][...] = jnp.where(is_readable, scales, 0.0)

    def widen(row: Any, column: Any, num_columns: int) -> None:
        rows, columns = pl.ds(row, tiles.WGMMA_ROWS), pl.ds(column, num_columns)
        wide = tiles.widened(raw.at[rows, columns])
        if options.cache.dtype != "int8":  # which has no NaN
            wide = tiles.only_seen(wide, first + row, tile.first_key, tile.end_key)
        operand.vectors.at[slot, rows, columns][...] = wide

    whole, rest = divmod(raw.shape[1], BYTES_AT_ONCE)
    for row in range(0, raw.shape[0], tiles.WGMMA_ROWS):
        # A loop: unrolled, it would keep the addresses of all parts in registers.
        pl.loop(0, whole)(lambda part, row=row: widen(row, pl.multiple_of(part * BYTES_AT_ONCE, BYTES_AT_ONCE), BYTES_AT_ONCE))
        if rest:
            widen(row, whole * BYTES_AT_ONCE, rest)
