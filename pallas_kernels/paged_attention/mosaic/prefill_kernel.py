"""The prefill kernel's three warpgroups: one fetches tiles of keys and values, two multiply, in turns.

The rows of the products are queries, one head's tokens after another's, and keys are the columns: S = Q K^T, O = P V (FlashAttention-2,
arXiv:2307.08691). While one computing warpgroup does its softmax the other's products run (FlashAttention-3, arXiv:2407.08608, 3.1).
Weights are operands from registers. As many thread blocks as there are cores go through the query tiles, and while an output is
written the next tile's keys are on their way.
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

from pallas_kernels.paged_attention.mosaic import tiles
from pallas_kernels.paged_attention.mosaic.prefill_config import PrefillConfig
from pallas_kernels.paged_attention.mosaic.prefill_fetch import fetch_all
from pallas_kernels.paged_attention.mosaic.prefill_store import store
from pallas_kernels.paged_attention.mosaic.query_tiles import TOKENS

NUM_COMPUTING = 2
FETCHING = 2
"""The warpgroups: 0 and 1 compute, 2 fetches."""
BY_QUERY, BY_KEY = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of vectors along the rows (queries) and the columns (keys) of a product."""
PRODUCT_COLUMNS = 192
"""Of longer rows of queries and keys so many are multiplied at a time: registers hold the address of each step of a product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is known when the kernel is traced; `num_parts`: of `config.tile_heads` query heads each, over all KV heads."""

    cache: tiles.Cache
    config: PrefillConfig
    num_parts: int
    num_blocks: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool

    @property
    def has_turns(self) -> bool:
        """A turn ends when the other warpgroup is at its next tile. With one stage, read to the end of this tile, it cannot get there."""
        return not self.cache.is_latent or self.config.num_stages > 1


class Global(NamedTuple):
    """References to arrays in GPU memory: `sinks` [parts, rows of a tile], base-2 logits."""

    tiles: Any
    count: Any
    tables: Any
    queries: Any
    sinks: Any
    pools: tiles.Pools
    output: Any


class Operand(NamedTuple):
    """Tiles of keys or values in shared memory, [stages, tile_keys, columns], and the scales of one-byte ones, [stages, tile_keys].

    `full[s]` completes when stage s may be read, `free[s]` when both computing warpgroups have read it; at first both say so.
    """

    vectors: Any
    scales: Any
    full: Any
    free: Any


class Shared(NamedTuple):
    """Shared memory and barriers of a thread block.

    `places` is a union of the output as whole boxes are written, the output as single rows are, and, if they share a place, the queries
    before them. `raw` are the tiles of one-byte pools; values that have to be cleared first are `landed`. At `turn` the
    computing warpgroups meet.
    """

    queries: Any
    places: Any
    keys: Operand
    values: Operand | None
    raw: tiles.Stages | None
    landed: Any
    query_full: Any
    query_free: Any
    turn: Any


class Tile(NamedTuple):
    """Scalars of a query tile, see `query_tiles.FIELDS`, and its part of the query heads."""

    row: Any
    token: Any
    first_token: Any
    end_token: Any
    position: Any
    first_key: Any
    end_key: Any
    first_tile: Any
    first_whole: Any
    end_whole: Any
    end_tile: Any
    part: Any


def kernel(*refs: Any, options: Options, pools: tiles.Pools) -> None:
    """The kernel's body: references to `Global`'s arrays, then `Shared`."""
    *arrays, shared = refs
    tile_table, count, tables, queries, *rest = arrays
    sinks = rest.pop(0) if options.has_sinks else None
    *pool_refs, output = rest
    memory = Global(tile_table, count, tables, queries, sinks, pools.rebuilt(pool_refs), output)
    num_items = count[0] * options.num_parts
    num_turns = turns_of(lax.axis_index("block"), num_items, options.num_blocks)

    def tile_of(turn: Any) -> Tile:
        item = item_of(turn, lax.axis_index("block"), options.num_blocks)
        number = lax.div(item, jnp.int32(options.num_parts))
        columns = [tile_table[number, column] for column in range(tile_table.shape[1])]
        fields = Tile._make([*columns, lax.rem(item, jnp.int32(options.num_parts))])
        return fields._replace(token=pl.multiple_of(fields.token, TOKENS))

    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == FETCHING)(lambda: fetch_all(memory, shared, options, num_turns, tile_of))
    pl.when(warpgroup != FETCHING)(lambda: _compute_all(memory, shared, options, num_turns, tile_of, warpgroup))


def item_of(turn: Any, block: Any, num_blocks: int) -> Any:
    """What a thread block does in its turn: items are sorted by length, so back and forth makes up for what it had more the time before."""
    return turn * num_blocks + jnp.where(lax.rem(turn, jnp.int32(2)) == 0, block, num_blocks - 1 - block)


def turns_of(block: Any, num_items: Any, num_blocks: int) -> Any:
    """How many turns a thread block has."""
    whole = lax.div(num_items, jnp.int32(num_blocks))
    return whole + (item_of(whole, block, num_blocks) < num_items).astype(jnp.int32)


def _compute_all(memory: Global, shared: Shared, options: Options, num_turns: Any, tile_of: Callable[[Any], Tile], warpgroup: Any) -> None:
    config = options.config
    plgpu.set_max_registers(config.compute_registers, action="increase")
    operands = [operand for operand in (shared.keys, shared.values) if operand is not None]
    plgpu.barrier_arrive(shared.query_free)
    for operand in operands:
        for slot in range(config.num_stages):
            release(operand, slot)

    def compute_tile(turn: Any, num_read: Any) -> Any:
        tile = tile_of(turn)
        plgpu.barrier_wait(shared.query_full)
        carry = (*_start(memory, options, tile, warpgroup), num_read)
        pl.when(warpgroup == 1)(lambda: take_turn(shared, options))
        add = functools.partial(_add_tile, shared, options, tile, warpgroup)
        first_whole = tile.first_tile
        if options.window is not None:
            first_whole = tile.first_whole
            carry = lax.fori_loop(tile.first_tile, first_whole, functools.partial(add, is_partial=True), carry)
        carry = lax.fori_loop(first_whole, tile.end_whole, functools.partial(add, is_partial=False), carry)
        _, total, weighted, num_read = lax.fori_loop(tile.end_whole, tile.end_tile, functools.partial(add, is_partial=True), carry)
        pl.when(warpgroup == 0)(lambda: take_turn(shared, options))
        if not config.output_in_queries:
            plgpu.barrier_arrive(shared.query_free)
        result = (weighted * tiles.along(1.0 / total, weighted.shape, 0)).astype(memory.output.dtype)
        # Read again: registers are scarce in the loops over keys.
        store(memory.output, shared, options, tile_of(turn), result, warpgroup)
        if config.output_in_queries:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(shared.query_free)
        return num_read

    lax.fori_loop(0, num_turns, compute_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def take_turn(shared: Shared, options: Options) -> None:
    """Meet the other computing warpgroup: one of them has issued its products, the other goes on to its own."""
    offer_turn(shared, options)
    await_turn(shared, options)


def offer_turn(shared: Shared, options: Options) -> None:
    """Tell the other computing warpgroup that it may go on."""
    if options.has_turns:
        plgpu.barrier_arrive(shared.turn)


def await_turn(shared: Shared, options: Options) -> None:
    """Wait until the other one says so."""
    if options.has_turns:
        plgpu.barrier_wait(shared.turn)


def await_full(operand: Operand, slot: Any) -> None:
    """Wait until a tile is there."""
    plgpu.barrier_wait(operand.full.at[slot])


def release(operand: Operand, slot: Any) -> None:
    """This warpgroup does not read the stage any more."""
    plgpu.barrier_arrive(operand.free.at[slot])


def _start(memory: Global, options: Options, tile: Tile, warpgroup: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Highest logit, sum of weights and weighted values of each query before any key: a sink is one without a value."""
    config = options.config
    rows = tiles.WGMMA_ROWS
    columns = options.cache.value_dim // (NUM_COMPUTING if config.splits_values else 1)
    highest = plgpu.layout_cast(jnp.full((rows,), tiles.MASKED, jnp.float32), BY_QUERY)
    total = plgpu.layout_cast(jnp.full((rows,), 1.0 if options.has_sinks else 0.0, jnp.float32), BY_QUERY)
    if options.has_sinks:
        group = 0 if config.splits_values else warpgroup
        highest = plgpu.load(memory.sinks.at[tile.part, pl.ds(group * rows, rows)], layout=BY_QUERY, optimized=False)
    return highest, total, plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def _add_tile(
    shared: Shared, options: Options, tile: Tile, warpgroup: Any, number: Any, carry: tuple[Any, ...], *, is_partial: bool
) -> tuple[Any, ...]:
    """One more tile of keys into the highest logit, the sum and the weighted values.

    Args:
        number: of the tile among the row's.
        is_partial: some query does not see some key of it.
    """
    config, cache = options.config, options.cache
    highest, total, weighted, num_read = carry
    slot = lax.rem(num_read, jnp.int32(config.num_stages))
    await_full(shared.keys, slot)
    products = _products(shared, options, warpgroup, slot)
    key_scales = plgpu.load(shared.keys.scales.at[slot], layout=BY_KEY, optimized=False) if cache.has_scales else None
    if not cache.is_latent:
        release(shared.keys, slot)
    scores, factor = scores_of(products, key_scales, options)
    if is_partial:
        scores = jnp.where(is_seen(options, tile, warpgroup, number), scores, -jnp.inf)
    new_highest = jnp.maximum(highest, scores.max(axis=1) * factor)
    weights = jnp.exp2(scores * factor - tiles.along(new_highest, scores.shape, 0))
    keep = jnp.exp2(highest - new_highest)
    weighted = weighted * tiles.along(keep, weighted.shape, 0)
    total = total * keep + weights.sum(axis=1)
    values = shared.values if shared.values is not None else shared.keys  # a latent's values are columns of its keys
    if key_scales is not None:
        value_scales = key_scales
        if not cache.is_latent:
            await_full(values, slot)
            value_scales = plgpu.load(values.scales.at[slot], layout=BY_KEY, optimized=False)
        weights = weights * tiles.along(value_scales, weights.shape, 1)
    weights = weights.astype(tiles.PRODUCT_DTYPE)
    weighted, total, new_highest, weights = lax.optimization_barrier((weighted, total, new_highest, weights))
    offer_turn(shared, options)
    if not cache.is_latent and not cache.has_scales:
        await_full(values, slot)
    await_turn(shared, options)
    weighted = pl.run_state(functools.partial(_add_values, values.vectors.at[slot], options, warpgroup, weights))(plgpu.ACC.init(weighted))
    release(values, slot)
    return new_highest, total, weighted, num_read + 1


def _products(shared: Shared, options: Options, warpgroup: Any, slot: Any) -> jax.Array:
    """Q K^T, [64, tile_keys]; the other warpgroup's turn comes while it runs."""
    config, cache = options.config, options.cache
    queries = (shared.places[0] if config.output_in_queries else shared.queries).at[0 if config.splits_values else warpgroup]
    keys = shared.keys.vectors.at[slot]

    def multiply(accumulator: Any) -> jax.Array:
        if cache.key_dim <= PRODUCT_COLUMNS:
            plgpu.wgmma(accumulator, queries, keys.transpose((1, 0)))
        else:
            columns = max(columns for columns in range(64, PRODUCT_COLUMNS + 1, 64) if cache.key_dim % columns == 0)

            @pl.loop(0, cache.key_dim // columns)
            def _(part: Any) -> None:
                span = pl.ds(pl.multiple_of(part * columns, columns), columns)
                plgpu.wgmma(accumulator, queries.at[:, span], keys.at[:, span].transpose((1, 0)))

        take_turn(shared, options)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((tiles.WGMMA_ROWS, config.tile_keys), jnp.float32))


def scores_of(products: jax.Array, key_scales: jax.Array | None, options: Options) -> tuple[jax.Array, float]:
    """Scores and the factor, larger than zero, that makes them base-2 logits: left to the exponential, it costs nothing."""
    if key_scales is not None:
        products = products * tiles.along(key_scales, products.shape, 1)
    if options.soft_cap is None:
        return products, options.scale * tiles.LOG2E
    return tiles.capped(products, options.scale / options.soft_cap), options.soft_cap * tiles.LOG2E


def is_seen(options: Options, tile: Tile, warpgroup: Any, number: Any) -> jax.Array:
    """Whether a row's query sees a key, bool [64, tile_keys]."""
    config = options.config
    shape = (tiles.WGMMA_ROWS, config.tile_keys)
    row = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=BY_QUERY)
    if not config.splits_values:
        row = row + warpgroup * tiles.WGMMA_ROWS
    # Relative to the tile, so that keys are constants.
    last = tile.position - number * config.tile_keys + lax.rem(row, jnp.int32(config.tile_tokens))
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    seen = key <= tiles.along(last, shape, 0)
    return seen if options.window is None else seen & (key > tiles.along(last - options.window, shape, 0))


def _add_values(values: Any, options: Options, warpgroup: Any, weights: jax.Array, accumulator: Any) -> None:
    """P V of this warpgroup's columns."""
    columns = accumulator.shape[1]
    if options.config.splits_values:
        values = values.at[:, pl.ds(pl.multiple_of(warpgroup * columns, columns), columns)]
    elif options.cache.is_latent:
        values = values.at[:, pl.ds(0, columns)]
    plgpu.wgmma(accumulator, weights, values)
