"""The kernel of `decode`: one warpgroup fetches tiles of keys and values, another computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic import tiles
from pallas_kernels.paged_attention.mosaic.config import Config, Heads
from pallas_kernels.paged_attention.mosaic.merge import finish_output
from pallas_kernels.paged_attention.mosaic.splits import FIELDS

COMPUTE, FETCH = 0, 1
"""The warpgroups."""
BYTE_COLUMNS = 2 * tiles.COLUMNS_AT_ONCE
"""Of numbers of one byte; swizzled rows have 128."""
BY_KEY, BY_HEAD = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of vectors along the rows (keys) and the columns (heads) of a product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is known when the kernel is traced."""

    cache: tiles.Cache
    config: Config
    heads: Heads
    scale: float
    soft_cap: float | None
    has_sinks: bool


class Global(NamedTuple):
    """References to arrays in GPU memory."""

    entries: Any
    count: Any
    tables: Any
    queries: Any
    sinks: Any
    pools: tiles.Pools
    output: Any
    partial: Any
    statistics: Any


class Shared(NamedTuple):
    """Shared memory and barriers of a thread block."""

    stages: tiles.Stages
    queries: Any
    query_full: Any
    query_free: Any
    wide_values: Any
    weights: Any
    output: Any
    partial: Any
    highest: Any
    total: Any


class Entry(NamedTuple):
    """Scalars of one entry, see `splits.FIELDS`, with its number and the part of the heads."""

    token: Any
    row: Any
    first: Any
    end: Any
    first_tile: Any
    end_tile: Any
    num_splits: Any
    number: Any
    part: Any

    def place(self, options: Options) -> tiles.Place:
        """Whose keys it reads."""
        parts_per_head = options.heads.parts // options.cache.num_kv_heads
        return tiles.Place(lax.div(self.part, jnp.int32(parts_per_head)), self.first, self.end)


def kernel(*refs: Any, options: Options, pools: tiles.Pools, num_blocks: int, is_split: bool) -> None:
    """One thread block: entries number `block`, `block + num_blocks`, ... of all parts of heads.

    `refs` are those of `Global`, with only what is there, and `Shared`.
    """
    *arrays, shared = refs
    entries, count, tables, queries, *rest = arrays
    sinks = rest.pop(0) if options.has_sinks else None
    *pool_refs, output, partial, statistics = rest
    memory = Global(entries, count, tables, queries, sinks, pools.rebuilt(pool_refs), output, partial, statistics)
    block = lax.axis_index("block")
    num_turns = lax.div(count[0] * options.heads.parts - block + (num_blocks - 1), jnp.int32(num_blocks))

    def entry_of(turn: Any) -> Entry:
        index = block + turn * num_blocks
        number = lax.div(index, jnp.int32(options.heads.parts))
        fields = {name: entries[number, field] for field, name in enumerate(FIELDS)}
        return Entry(**fields, number=number, part=lax.rem(index, jnp.int32(options.heads.parts)))

    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == FETCH)(lambda: _fetch_all(memory, shared, options, num_turns, entry_of))
    pl.when(warpgroup == COMPUTE)(lambda: _compute_all(memory, shared, options, num_turns, entry_of, is_split))


# ---- fetching ----------------------------------------------------------------------------------------------------------


def _fetch_all(memory: Global, shared: Shared, options: Options, num_turns: Any, entry_of: Callable[[Any], Entry]) -> None:
    """The queries and tiles of every entry, as fast as their places get free."""
    stages, config = shared.stages, options.config

    def fetch_entry(turn: Any, num_fetched: Any) -> Any:
        entry = entry_of(turn)
        query_slot = lax.rem(turn, jnp.int32(config.num_query_slots))
        wait_until_free(shared.query_free, query_slot, turn, config.num_query_slots)
        plgpu.copy_gmem_to_smem(memory.queries.at[entry.token, entry.part], shared.queries.at[query_slot], shared.query_full.at[query_slot])

        def fetch(tile: Any, num_fetched: Any) -> Any:
            blocks = tiles.tile_blocks(options.cache, memory.tables, entry.row, tile, config.tile_keys)
            slot = lax.rem(num_fetched, jnp.int32(config.num_stages))
            wait_until_free(stages.free, slot, num_fetched, config.num_stages)
            tiles.fetch_tile(options.cache, memory.pools, blocks, entry.place(options), tile, stages, slot)
            return num_fetched + 1

        return lax.fori_loop(entry.first_tile, entry.end_tile, fetch, num_fetched)

    num_fetched = lax.fori_loop(0, num_turns, fetch_entry, jnp.int32(0))
    _wait_for_readers(stages.free, num_fetched, config.num_stages)
    _wait_for_readers(shared.query_free, num_turns, config.num_query_slots)


def wait_until_free(free: Any, slot: Any, num_used: Any, num_slots: int) -> None:
    """Wait until what was fetched into a slot last time has been read; the first time there is nothing to wait for."""
    pl.when(num_used >= num_slots)(lambda: plgpu.barrier_wait(free.at[slot]))


def _wait_for_readers(free: Any, num_used: Any, num_slots: int) -> None:
    """Nothing may be on its way to shared memory when a thread block ends."""
    for slot in range(num_slots):
        pl.when(num_used > slot)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))


# ---- computing ---------------------------------------------------------------------------------------------------------


def _compute_all(
    memory: Global, shared: Shared, options: Options, num_turns: Any, entry_of: Callable[[Any], Entry], is_split: bool
) -> None:
    config = options.config

    def compute_entry(turn: Any, num_read: Any) -> Any:
        entry = entry_of(turn)
        query_slot = lax.rem(turn, jnp.int32(config.num_query_slots))
        highest, sums, weighted = _start(memory, options, entry)
        plgpu.barrier_wait(shared.query_full.at[query_slot])

        def step(tile: Any, carry: Any) -> Any:
            num_read, *running = carry
            slot = lax.rem(num_read, jnp.int32(config.num_stages))
            running = _add_tile(shared, options, entry, tile, slot, query_slot, running)
            return num_read + 1, *running

        carry = lax.fori_loop(entry.first_tile, entry.end_tile, step, (num_read, highest, sums, weighted))
        num_read, highest, sums, weighted = carry
        plgpu.barrier_arrive(shared.query_free.at[query_slot])
        _write(memory, shared, options, entry, (highest, sums.sum(axis=0), weighted), is_split)
        return num_read

    lax.fori_loop(0, num_turns, compute_entry, jnp.int32(0))


def _start(memory: Global, options: Options, entry: Entry) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Highest logit, sums of weights (a summand for each key of a tile) and weighted values. The sink is in the first split."""
    config = options.config
    heads, keys = options.heads.tile, config.tile_keys
    highest = plgpu.layout_cast(jnp.full((heads,), tiles.MASKED, jnp.float32), BY_HEAD)
    sums = plgpu.layout_cast(jnp.zeros((keys, heads), jnp.float32), plgpu.Layout.WGMMA)
    if options.has_sinks:
        is_first = (lax.div(entry.first, jnp.int32(keys)) == entry.first_tile).astype(jnp.float32)
        sinks = plgpu.load(memory.sinks.at[entry.part], layout=BY_HEAD, optimized=False)
        highest = sinks * is_first + tiles.MASKED * (1 - is_first)
        position = plgpu.broadcasted_iota(jnp.int32, (keys, heads), 0, layout=plgpu.Layout.WGMMA)
        sums = jnp.where(position == 0, 1.0, sums) * is_first
    return highest, sums, plgpu.layout_cast(jnp.zeros((options.cache.value_columns, heads), jnp.float32), plgpu.Layout.WGMMA)


def _add_tile(shared: Shared, options: Options, entry: Entry, tile: Any, slot: Any, query_slot: Any, running: Any) -> Any:
    """One more tile into the highest logit, the sums and the weighted values."""
    cache, stages = options.cache, shared.stages
    keys, heads = options.config.tile_keys, options.heads.tile
    highest, sums, weighted = running
    await_tile(stages.full, slot)
    products = _products(shared, options, slot, query_slot)
    key_scales = plgpu.load(stages.key_scales.at[slot], layout=BY_KEY, optimized=False) if cache.has_scales else None
    scores = tiles.logits(products, key_scales, 0, options.scale, options.soft_cap)
    position = tiles.key_positions((keys, heads), 0, tile, keys)
    is_seen = (position >= entry.first) & (position < entry.end)
    highest, weights, keep = tiles.softmax_tile(scores, is_seen, highest, 0)
    sums = sums * tiles.along(keep, sums.shape, 1) + weights
    weighted = weighted * tiles.along(keep, weighted.shape, 1)
    if key_scales is not None:
        value_scales = key_scales if cache.is_latent else plgpu.load(stages.value_scales.at[slot], layout=BY_KEY, optimized=False)
        weights = jnp.where(is_seen, weights * tiles.along(value_scales, weights.shape, 0), 0.0)
    values = _values(shared, options, entry, tile, slot)
    shared.weights.transpose((1, 0))[...] = plgpu.layout_cast(weights.astype(tiles.PRODUCT_DTYPE), plgpu.Layout.WGMMA_TRANSPOSED)
    publish()

    def add(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, values.transpose((1, 0)), shared.weights.transpose((1, 0)))

    weighted = pl.run_state(add)(plgpu.ACC.init(weighted))
    release_tile(stages.free, slot)
    return highest, sums, weighted


def await_tile(full: Any, slot: Any) -> None:
    """Until all copies into a stage have landed."""
    plgpu.barrier_wait(full.at[slot])


def publish() -> None:
    """What this warpgroup wrote to shared memory can be read by products and copies."""
    plgpu.commit_smem()


def release_tile(free: Any, slot: Any) -> None:
    """A stage may be fetched into again."""
    plgpu.barrier_arrive(free.at[slot])


def _products(shared: Shared, options: Options, slot: Any, query_slot: Any) -> jax.Array:
    """K q^T, [tile_keys, tile_heads]."""
    cache, config = options.cache, options.config
    keys, queries = shared.stages.keys.at[slot], shared.queries.at[query_slot]

    def multiply(accumulator: Any) -> jax.Array:
        if not cache.has_scales:
            plgpu.wgmma(accumulator, keys, queries.transpose((1, 0)))
            return accumulator[...]
        for start in range(0, cache.key_dim, BYTE_COLUMNS):
            columns = pl.ds(start, min(BYTE_COLUMNS, cache.key_dim - start))
            plgpu.wgmma(accumulator, tiles.widened(keys.at[:, columns]), queries.at[:, columns].transpose((1, 0)))
            plgpu.wgmma_wait(0)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((config.tile_keys, options.heads.tile), jnp.float32))


def _values(shared: Shared, options: Options, entry: Entry, tile: Any, slot: Any) -> Any:
    """The tile's values in shared memory as an operand, zero where they are not seen: zero times NaN is NaN."""
    cache, keys = options.cache, options.config.tile_keys
    values = value_stage(shared.stages, cache).at[slot, :, pl.ds(0, cache.value_dim)]
    if shared.wide_values is None:
        tiles.clear_unseen(values, tile, keys, entry.first, entry.end)
        return values
    for rows, columns in tiles.pieces(keys, cache.value_dim, BYTE_COLUMNS if cache.has_scales else tiles.COLUMNS_AT_ONCE):
        piece = tiles.widened(values.at[rows, columns])
        if cache.dtype != "int8":  # which has no NaN
            piece = tiles.only_seen(piece, tile * keys + rows.start, entry.first, entry.end)
        shared.wide_values.at[rows, columns][...] = piece
    return shared.wide_values


def value_stage(stages: tiles.Stages, cache: tiles.Cache) -> Any:
    """Where values are fetched to."""
    return stages.keys if cache.is_latent else stages.values


def _write(memory: Global, shared: Shared, options: Options, entry: Entry, result: Any, is_split: bool) -> None:
    """The output if this was all of the row, else the partial result and its highest logit and sum."""
    highest, total, weighted = result

    @pl.when(entry.num_splits == 1)
    def _() -> None:
        finish_output(memory.output, shared.output, entry.token, entry.part, options.heads.live, total, weighted)

    if is_split:

        @pl.when(entry.num_splits > 1)
        def _() -> None:
            shared.partial.transpose((1, 0))[...] = plgpu.layout_cast(weighted, plgpu.Layout.WGMMA_TRANSPOSED)
            shared.highest[...] = highest
            shared.total[...] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared.partial.at[pl.ds(0, options.heads.live)], memory.partial.at[entry.number, entry.part])
            plgpu.copy_smem_to_gmem(shared.highest, memory.statistics.at[entry.number, entry.part, 0])
            plgpu.copy_smem_to_gmem(shared.total, memory.statistics.at[entry.number, entry.part, 1])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
