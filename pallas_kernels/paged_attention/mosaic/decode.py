"""Attention of single tokens: as few operations and registers as possible beside the stream of keys and values.

Keys are the rows of the products and query heads their columns, S^T = K q^T and O^T = V^T P^T: a matrix instruction has 64 rows,
which tiles of keys fill and the few heads of a group would not. One warpgroup fetches tiles, another computes; as many thread
blocks as fit on the device go through the entries of `splits`. What does not lie in one entry is added up by `merge`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common import mosaic
from pallas_kernels.paged_attention.mosaic import tiles
from pallas_kernels.paged_attention.mosaic.config import REDUCTION_BYTES, Config, head_tiles
from pallas_kernels.paged_attention.mosaic.merge import finish_output, merge
from pallas_kernels.paged_attention.mosaic.splits import Items, most_splits, work_of

COMPUTE, FETCH = 0, 1
"""The warpgroups."""
BYTE_COLUMNS = 2 * tiles.COLUMNS_AT_ONCE
"""Of numbers of one byte; swizzled rows have 128."""
BY_KEY, BY_HEAD = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of vectors along the rows (keys) and the columns (heads) of a product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is known when the kernel is traced; `num_heads`: parts of query heads of a token, `live_heads`: query heads of a part."""

    cache: tiles.Cache
    config: Config
    num_heads: int
    live_heads: int
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
        parts_per_head = options.num_heads // options.cache.num_kv_heads
        return tiles.Place(lax.div(self.part, jnp.int32(parts_per_head)), self.first, self.end)


def decode_items(
    q: Float[Array, "T H D"],
    pools: tiles.Pools,
    block_tables: Int32[Array, "B P"],
    items: Items,
    sinks: Float32[Array, "H"] | None,
    output: Any,
    options: Options,
    *,
    window: int | None,
    interpret: bool,
) -> None:
    """Write the outputs of the live items into `output`, a mutable reference to [T, H, value_columns]; other tokens' stay as they are."""
    config, cache = options.config, options.cache
    most_keys = block_tables.shape[1] * cache.block_size
    work = work_of(items, config, window, most_keys)
    is_split = most_splits(config, most_keys) > 1
    parts, heads, columns = options.num_heads, config.tile_heads, cache.value_columns
    num_entries = work.entries.shape[0] if is_split else 1
    partial = jax.new_ref(lax.empty((num_entries, parts, options.live_heads, columns), jnp.float32))
    statistics = jax.new_ref(lax.empty((num_entries, parts, 2, heads), jnp.float32))
    num_blocks = min(work.entries.shape[0] * parts, mosaic.device().num_cores * config.blocks_per_core)
    queries = _by_part(q.astype(tiles.PRODUCT_DTYPE), parts, heads)
    sink_array = _sinks_by_part(sinks, options)
    body = functools.partial(_kernel, options=options, pools=pools, num_blocks=num_blocks, is_split=is_split)
    mosaic.kernel(
        body,
        interpret=interpret,
        out_type=(),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[_shared_types(options, output.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        kernel_name="paged_attention_decode",
    )(work.entries, work.count, block_tables, queries, *sink_array, *pools.present(), output, partial, statistics)
    if is_split:
        merge(work.merges, partial, statistics, output, heads, options.live_heads, interpret=interpret)


def _by_part(q: Array, num_parts: int, tile_heads: int) -> Array:
    """[T, parts, tile_heads, D]: the heads of each part, then zeros."""
    num_tokens, num_heads, dim = q.shape
    live = num_heads // num_parts
    return jnp.pad(q.reshape(num_tokens, num_parts, live, dim), ((0, 0), (0, 0), (0, tile_heads - live), (0, 0)))


def _sinks_by_part(sinks: Array | None, options: Options) -> list[Array]:
    if sinks is None:
        return []
    by_part = sinks.astype(jnp.float32).reshape(options.num_heads, options.live_heads) * tiles.LOG2E
    return [jnp.pad(by_part, ((0, 0), (0, options.config.tile_heads - options.live_heads)))]


def _shared_types(options: Options, dtype: Any) -> Shared:
    cache, config = options.cache, options.config
    heads, keys = config.tile_heads, config.tile_keys
    product = tiles.PRODUCT_DTYPE

    def operand(shape: tuple[int, ...], dim: int) -> Any:
        return plgpu.SMEM(shape, product, transforms=tiles.operand_transforms(dim, product))

    value_dim = cache.keys_in_row if cache.is_latent and not cache.copies_values else cache.value_dim
    return Shared(
        stages=tiles.stage_types(cache, keys, config.num_stages),
        queries=operand((config.num_query_slots, heads, cache.key_dim), cache.keys_in_row),
        query_full=plgpu.Barrier(num_barriers=config.num_query_slots),
        query_free=plgpu.Barrier(num_barriers=config.num_query_slots),
        wide_values=operand((keys, cache.value_columns), value_dim) if cache.copies_values else None,
        weights=plgpu.SMEM((heads, keys), product, transforms=tiles.operand_transforms(value_dim, product)),
        output=plgpu.SMEM((heads, cache.value_columns), dtype),
        partial=plgpu.SMEM((heads, cache.value_columns), jnp.float32),
        highest=plgpu.SMEM((heads,), jnp.float32),
        total=plgpu.SMEM((heads,), jnp.float32),
    )


def _kernel(*refs: Any, options: Options, pools: tiles.Pools, num_blocks: int, is_split: bool) -> None:
    *arrays, shared = refs
    entries, count, tables, queries, *rest = arrays
    sinks = rest.pop(0) if options.has_sinks else None
    *pool_refs, output, partial, statistics = rest
    memory = Global(entries, count, tables, queries, sinks, pools.rebuilt(pool_refs), output, partial, statistics)
    block = lax.axis_index("block")
    num_turns = lax.div(count[0] * options.num_heads - block + (num_blocks - 1), jnp.int32(num_blocks))

    def entry_of(turn: Any) -> Entry:
        index = block + turn * num_blocks
        number = lax.div(index, jnp.int32(options.num_heads))
        fields = [entries[number, field] for field in range(entries.shape[1])]
        return Entry(*fields, number, lax.rem(index, jnp.int32(options.num_heads)))

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
    heads, keys = config.tile_heads, config.tile_keys
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
    keys, heads = options.config.tile_keys, options.config.tile_heads
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
    if cache.has_scales:
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

    return pl.run_scoped(multiply, plgpu.ACC((config.tile_keys, config.tile_heads), jnp.float32))


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
        finish_output(memory.output, shared.output, entry.token, entry.part, options.live_heads, total, weighted)

    if is_split:

        @pl.when(entry.num_splits > 1)
        def _() -> None:
            shared.partial.transpose((1, 0))[...] = plgpu.layout_cast(weighted, plgpu.Layout.WGMMA_TRANSPOSED)
            shared.highest[...] = highest
            shared.total[...] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared.partial.at[pl.ds(0, options.live_heads)], memory.partial.at[entry.number, entry.part])
            plgpu.copy_smem_to_gmem(shared.highest, memory.statistics.at[entry.number, entry.part, 0])
            plgpu.copy_smem_to_gmem(shared.total, memory.statistics.at[entry.number, entry.part, 1])
            plgpu.wait_smem_to_gmem(0)


def options_of(cache: tiles.Cache, config: Config, num_heads: int, scale: float, soft_cap: float | None, has_sinks: bool) -> Options:
    """Options for so many query heads."""
    parts = cache.num_kv_heads * head_tiles(cache, num_heads // cache.num_kv_heads)
    return Options(
        cache=cache,
        config=config,
        num_heads=parts,
        live_heads=num_heads // parts,
        scale=scale,
        soft_cap=soft_cap,
        has_sinks=has_sinks,
    )
