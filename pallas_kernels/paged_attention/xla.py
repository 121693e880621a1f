"""Paged attention in plain XLA: tiles of one row's queries against fixed tiles of keys, with a running maximum and sum.

The loop ends at the longest row of the batch, so the width of the block tables is not work. Every dot has the same
shape per tile whatever the batch, and the key tiles are added in order: on a CPU a query's result has the same bits in
any batch and with any split of its prompt. Masked tiles beyond a row's end multiply by one and add zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

_MASKED = -1e30


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
    k_blocks: Float[Array, "K N S D"],
    v_blocks: Float[Array, "K N S D"],
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    *,
    scale: float,
    window: int | None = None,
    config: Config | None = None,
) -> Float[Array, "T H D"]:
    """See `api.paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, _, block_size, _ = k_blocks.shape
    num_rows = context_lens.shape[0]
    group = num_heads // num_kv_heads
    config = config or pick_config(group, block_size)
    tile_row, tile_token = _tiles_of_queries(query_start_loc, num_tokens, num_rows, config.tile_queries)  # [A], [A U]
    first_position = context_lens - (query_start_loc[1:] - query_start_loc[:-1])  # [B]
    position = first_position[tile_row][:, None] + tile_token - query_start_loc[tile_row][:, None]  # [A U]
    in_row = (tile_token < query_start_loc[tile_row + 1][:, None]) & (position >= 0)
    end_key = jnp.where(in_row, position + 1, 0)  # [A U]; a padding query sees nothing

    num_tiles = tile_row.shape[0]
    tile_q = q[jnp.clip(tile_token, 0, num_tokens - 1)]  # [A U H D]
    tile_q = tile_q.reshape(num_tiles, config.tile_queries, num_kv_heads, group, head_dim)
    tile_q = tile_q.transpose(2, 0, 1, 3, 4).reshape(num_kv_heads, num_tiles, config.tile_queries * group, head_dim)
    end_key = jnp.repeat(end_key, group, axis=1)
    output = _attend(tile_q, end_key, k_blocks, v_blocks, block_tables[tile_row], config.tile_keys, scale, window)

    output = output.reshape(num_kv_heads, num_tiles, config.tile_queries, group, head_dim).transpose(1, 2, 0, 3, 4)
    output = output.reshape(num_tiles * config.tile_queries, num_heads, head_dim).astype(q.dtype)
    # Each real token stands in exactly one tile: find it there, rather than scatter.
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.clip(jnp.searchsorted(query_start_loc, token, side="right").astype(jnp.int32) - 1, 0, num_rows - 1)
    first_tile = _first_tiles(query_start_loc, config.tile_queries)[row]
    offset = token - query_start_loc[row]
    place = first_tile * config.tile_queries + offset
    return output[jnp.clip(place, 0, output.shape[0] - 1)]


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
    end_key: Int32[Array, "A M"],
    k_blocks: Float[Array, "K N S D"],
    v_blocks: Float[Array, "K N S D"],
    tile_tables: Int32[Array, "A P"],
    tile_keys: int,
    scale: float,
    window: int | None,
) -> Float[Array, "K A M D"]:
    """Each query over keys 0..end_key - 1 of its tile's row (the last `window` of them), float32."""
    num_kv_heads, num_tiles, _, head_dim = tile_q.shape
    block_size = k_blocks.shape[2]
    blocks_per_tile = tile_keys // block_size
    tile_tables = jnp.pad(tile_tables, ((0, 0), (0, -tile_tables.shape[1] % blocks_per_tile)))
    first_key = end_key - window if window is not None else jnp.zeros_like(end_key)

    def add_tile(index: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, weighted = carry
        blocks = lax.dynamic_slice_in_dim(tile_tables, index * blocks_per_tile, blocks_per_tile, axis=1)
        keys = k_blocks[:, blocks].reshape(num_kv_heads, num_tiles, tile_keys, head_dim)
        values = v_blocks[:, blocks].reshape(num_kv_heads, num_tiles, tile_keys, head_dim)
        key = (index * tile_keys + jnp.arange(tile_keys, dtype=jnp.int32))[None, None, :]
        is_seen = (key < end_key[..., None]) & (key >= first_key[..., None])  # [A M C]
        # Zero times NaN is NaN: what no query of the tile sees must not reach the product.
        values = jnp.where(is_seen.any(axis=1)[None, :, :, None], values, jnp.zeros((), values.dtype))
        scores = lax.dot_general(tile_q, keys, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        scores = jnp.where(is_seen[None], scores * scale, _MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        weights = jnp.where(is_seen[None], jnp.exp(scores - new_highest[..., None]), 0.0)
        keep = jnp.exp(highest - new_highest)
        added = lax.dot_general(weights.astype(values.dtype), values, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        return new_highest, total * keep + weights.sum(axis=-1), weighted * keep[..., None] + added

    num_key_tiles = (jnp.max(end_key) + tile_keys - 1) // tile_keys
    shape = tile_q.shape[:3]
    start = (jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(tile_q.shape, jnp.float32))
    _, total, weighted = lax.fori_loop(0, num_key_tiles, add_tile, start)
    return weighted / jnp.where(total > 0, total, 1.0)[..., None]
