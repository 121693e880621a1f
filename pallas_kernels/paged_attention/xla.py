"""Paged attention in plain XLA: tiles of one row's queries against fixed tiles of keys, with a running maximum and sum.

The loop ends at the longest row of the batch, so the width of the block tables is not work. Every dot has the same
shape per tile whatever the batch, and the key tiles are added in order: on a CPU a query's result has the same bits in
any batch and with any split of its prompt. Masked tiles beyond a row's end multiply by one and add zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

_MASKED = -1e30
_OVER_LAST = (((3,), (3,)), ((0, 1), (0, 1)))
_OVER_KEYS = (((3,), (2,)), ((0, 1), (0, 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tile sizes: queries of one row, and keys, that one dot takes."""

    tile_queries: int
    tile_keys: int


ROWS_PER_DOT = 12
"""Query heads times queries of a tile. XLA's CPU backend gives other bits at other numbers of rows, hence one number for
decode and prefill; it is little work for a decoding row and still shares the keys between some queries of a prompt."""


def pick_config(group: int, block_size: int) -> Config:
    """A pure function of what does not depend on the batch."""
    return Config(tile_queries=max(1, ROWS_PER_DOT // group), tile_keys=max(128, block_size))


def paged_attention(
    q: Float[Array, "T H D"],
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S Dv"] | None,
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, "H"] | None = None,
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    value_dim: int | None = None,
    config: Config | None = None,
) -> Float[Array, "T H Dv"]:
    """See `api.paged_attention`."""
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k_blocks.shape[0]
    config = config or pick_config(group, k_blocks.shape[2])
    tile_row, tile_token = _tiles_of_queries(query_start_loc, num_tokens, context_lens.shape[0], config.tile_queries)  # [A], [A U]
    first_position = context_lens - (query_start_loc[1:] - query_start_loc[:-1])  # [B]
    position = first_position[tile_row][:, None] + tile_token - query_start_loc[tile_row][:, None]  # [A U]
    in_row = (tile_token < query_start_loc[tile_row + 1][:, None]) & (position >= 0)
    end_key = jnp.repeat(jnp.where(in_row, position + 1, 0), group, axis=1)  # [A M]; a padding query sees nothing

    pools = _Pools(k_blocks, v_blocks, k_scales, v_scales, value_dim)
    seen = _Seen(end_key, end_key - window if window is not None else jnp.zeros_like(end_key))
    tile_q = _to_tiles(q[jnp.clip(tile_token, 0, num_tokens - 1)], group)
    tile_sinks = None if sinks is None else jnp.tile(sinks.astype(jnp.float32).reshape(-1, 1, group), (1, 1, config.tile_queries))
    output = _attend(tile_q, seen, pools, block_tables[tile_row], config.tile_keys, (scale, soft_cap), tile_sinks)
    place = _places(query_start_loc, num_tokens, config.tile_queries)
    return _from_tiles(output, config.tile_queries)[jnp.clip(place, 0, output.shape[1] * config.tile_queries - 1)].astype(q.dtype)


class _Pools(NamedTuple):
    """What the keys and values are read from."""

    keys: Num[Array, "K N S D"]
    values: Num[Array, "K N S Dv"] | None
    key_scales: Float32[Array, "K N S"] | None
    value_scales: Float32[Array, "K N S"] | None
    latent_dim: int | None

    @property
    def value_dim(self) -> int | None:
        return self.latent_dim if self.values is None else self.values.shape[3]


class _Seen(NamedTuple):
    """Each query of a tile sees keys `first` to `end` - 1 of the tile's row."""

    end: Int32[Array, "A M"]
    first: Int32[Array, "A M"]


def _to_tiles(q: Float[Array, "A U H D"], group: int) -> Float[Array, "K A M D"]:
    """The queries that share a KV head side by side: M = U * group."""
    num_tiles, tile_queries, num_heads, head_dim = q.shape
    q = q.reshape(num_tiles, tile_queries, num_heads // group, group, head_dim).transpose(2, 0, 1, 3, 4)
    return q.reshape(num_heads // group, num_tiles, tile_queries * group, head_dim)


def _from_tiles(output: Float[Array, "K A M Dv"], tile_queries: int) -> Float[Array, "AU H Dv"]:
    """The reverse, tiles one after another."""
    num_kv_heads, num_tiles, rows, value_dim = output.shape
    group = rows // tile_queries
    output = output.reshape(num_kv_heads, num_tiles, tile_queries, group, value_dim).transpose(1, 2, 0, 3, 4)
    return output.reshape(num_tiles * tile_queries, num_kv_heads * group, value_dim)


def _places(query_start_loc: Int32[Array, "B1"], num_tokens: int, tile_queries: int) -> Int32[Array, "T"]:
    """Where each token stands among the tiles' queries: in exactly one tile, so that it is found rather than scattered."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_start_loc, token, side="right").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, query_start_loc.shape[0] - 2)
    return _first_tiles(query_start_loc, tile_queries)[row] * tile_queries + token - query_start_loc[row]


def _first_tiles(query_start_loc: Int32[Array, "B1"], tile_queries: int) -> Int32[Array, "B"]:
    """The number of tiles before each row's first."""
    tiles = -(-(query_start_loc[1:] - query_start_loc[:-1]) // tile_queries)
    return jnp.cumsum(tiles).astype(jnp.int32) - tiles


def _tiles_of_queries(
    query_start_loc: Int32[Array, "B1"], num_tokens: int, num_rows: int, tile_queries: int
) -> tuple[Int32[Array, "A"], Int32[Array, "A U"]]:
    """The row of each tile and the tokens in it; tiles past the last are padding of the last row."""
    num_tiles = min(num_tokens, num_tokens // tile_queries + num_rows)
    first_tile = _first_tiles(query_start_loc, tile_queries)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # side="right" skips rows without queries: of several rows that begin at one tile the last one owns it.
    row = jnp.clip(jnp.searchsorted(first_tile, tile, side="right").astype(jnp.int32) - 1, 0, num_rows - 1)
    within = (tile - first_tile[row])[:, None] * tile_queries + jnp.arange(tile_queries, dtype=jnp.int32)[None, :]
    return row, query_start_loc[row][:, None] + within


def _attend(
    tile_q: Float[Array, "K A M D"],
    seen: _Seen,
    pools: _Pools,
    tile_tables: Int32[Array, "A P"],
    tile_keys: int,
    scale_and_cap: tuple[float, float | None],
    sinks: Float32[Array, "K 1 M"] | None,
) -> Float32[Array, "K A M Dv"]:
    """Each query over the keys that it sees; a sink is where the running maximum and sum start."""
    blocks_per_tile = tile_keys // pools.keys.shape[2]
    tile_tables = jnp.pad(tile_tables, ((0, 0), (0, -tile_tables.shape[1] % blocks_per_tile)))
    scale, soft_cap = scale_and_cap

    def add_tile(index: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, weighted = carry
        blocks = lax.dynamic_slice_in_dim(tile_tables, index * blocks_per_tile, blocks_per_tile, axis=1)
        key = (index * tile_keys + jnp.arange(tile_keys, dtype=jnp.int32))[None, None, :]
        is_seen = (key < seen.end[..., None]) & (key >= seen.first[..., None])  # [A M C]
        keys, values, key_scales, value_scales = _read_tile(pools, blocks, is_seen.any(axis=1), tile_q.dtype)
        scores = lax.dot_general(tile_q.astype(keys.dtype), keys, _OVER_LAST, preferred_element_type=jnp.float32) * scale
        if key_scales is not None:
            scores = scores * key_scales[:, :, None, :]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(is_seen[None], scores, _MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        weights = jnp.where(is_seen[None], jnp.exp(scores - new_highest[..., None]), 0.0)
        keep = jnp.exp(highest - new_highest)
        total = total * keep + weights.sum(axis=-1)
        if value_scales is not None:
            weights = weights * value_scales[:, :, None, :]
        added = lax.dot_general(weights.astype(values.dtype), values, _OVER_KEYS, preferred_element_type=jnp.float32)
        return new_highest, total, weighted * keep[..., None] + added

    num_key_tiles = (jnp.max(seen.end) + tile_keys - 1) // tile_keys
    shape = tile_q.shape[:3]
    highest = jnp.full(shape, _MASKED, jnp.float32) if sinks is None else jnp.broadcast_to(sinks, shape)
    start = (highest, jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32), jnp.zeros((*shape, pools.value_dim), jnp.float32))
    _, total, weighted = lax.fori_loop(0, num_key_tiles, add_tile, start)
    return weighted / jnp.where(total > 0, total, 1.0)[..., None]


def _read_tile(
    pools: _Pools, blocks: Int32[Array, "A b"], is_seen: Bool[Array, "A C"], q_dtype: jnp.dtype
) -> tuple[Float[Array, "K A C D"], Float[Array, "K A C Dv"], Float32[Array, "K A C"] | None, Float32[Array, "K A C"] | None]:
    """Keys, values and their scales of some blocks of each tile's row, in a dtype that loses nothing of either side."""
    dtype = max(q_dtype, pools.keys.dtype, key=lambda dtype: dtype.itemsize)

    def read(pool: Num[Array, "K N S *D"]) -> Num[Array, "K A C *D"]:
        return pool[:, blocks].reshape(pool.shape[0], *is_seen.shape, *pool.shape[3:])

    keys = read(pools.keys).astype(dtype)
    values = keys[..., : pools.value_dim] if pools.values is None else read(pools.values).astype(dtype)
    # Zero times NaN is NaN: what no query of the tile sees must not reach the product.
    values = jnp.where(is_seen[None, :, :, None], values, jnp.zeros((), dtype))
    if pools.key_scales is None:
        return keys, values, None, None
    key_scales = read(pools.key_scales)
    value_scales = key_scales if pools.value_scales is None else read(pools.value_scales)
    return keys, values, key_scales, jnp.where(is_seen[None], value_scales, 0.0)
