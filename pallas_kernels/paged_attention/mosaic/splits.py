"""Who computes what when tokens are decoded: one entry for each part of each token's keys, the same entries for a row in any batch."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.paged_attention.mosaic.config import Config

FIELDS = ("token", "row", "first", "end", "first_tile", "end_tile", "num_splits")
"""Of an entry. The token sees keys `first` to `end` - 1 of table row `row`, of which the entry covers tiles `first_tile` to
`end_tile` - 1, as one of `num_splits`."""


class Items(NamedTuple):
    """Tokens to be decoded, whose outputs are written.

    Attributes:
        token: their places in q.
        row: the rows whose keys they read.
        end: how many keys they see, or saw without a window; 0: none, the output is zero.
        is_live: others are left out.
    """

    token: Int32[Array, "I"]
    row: Int32[Array, "I"]
    end: Int32[Array, "I"]
    is_live: Bool[Array, "I"]


class Work(NamedTuple):
    """What the kernels read.

    Attributes:
        entries: [W, 7], see `FIELDS`; the splits of a token one after another. Those past `count` mean nothing.
        count: entries there are.
        merges: for each item its token, its first entry and its number of entries.
    """

    entries: Int32[Array, "W 7"]
    count: Int32[Array, "1"]
    merges: Int32[Array, "I 3"]


def every_token(num_tokens: int, query_start_loc: Int32[Array, "B1"], context_lens: Int32[Array, "B"]) -> Items:
    """Each token by itself; those past the last row see nothing."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # compare_all: a loop on the device would be many small kernels.
    row = jnp.searchsorted(query_start_loc, token, side="right", method="compare_all").astype(jnp.int32) - 1
    row = jnp.clip(row, 0, context_lens.shape[0] - 1)
    end = context_lens[row] - query_start_loc[row + 1] + token + 1
    return Items(token, row, jnp.where(token < query_start_loc[-1], end, 0), jnp.ones(num_tokens, bool))


def rows_of_one(query_start_loc: Int32[Array, "B1"], context_lens: Int32[Array, "B"]) -> Items:
    """The rows that have one query."""
    row = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
    return Items(query_start_loc[:-1], row, context_lens, query_start_loc[1:] - query_start_loc[:-1] == 1)


def most_splits(config: Config, most_keys: int) -> int:
    """Entries that a token with so many keys has at most."""
    tiles = -(-most_keys // config.tile_keys)
    return max(1, min(config.max_splits, tiles // (config.min_split_keys // config.tile_keys)))


def work_of(items: Items, config: Config, window: int | None, most_keys: int) -> Work:
    """The entries of all live items, without gaps.

    Into what an item is split depends on the number of its own tiles and on nothing else, or its bits would depend on the batch.
    """
    tile_keys, min_tiles = config.tile_keys, config.min_split_keys // config.tile_keys
    first = jnp.zeros_like(items.end) if window is None else jnp.maximum(items.end - window, 0)
    first_tile = first // tile_keys
    num_tiles = (items.end + tile_keys - 1) // tile_keys - first_tile
    wanted_splits = jnp.clip(num_tiles // min_tiles, 1, config.max_splits)
    tiles_per_split = jnp.maximum(-(-num_tiles // wanted_splits), 1)
    num_splits = jnp.where(items.is_live, jnp.maximum(-(-num_tiles // tiles_per_split), 1), 0)
    ends = jnp.cumsum(num_splits)
    entry = jnp.arange(items.end.shape[0] * most_splits(config, most_keys), dtype=jnp.int32)
    item = jnp.searchsorted(ends, entry, side="right", method="compare_all").astype(jnp.int32)
    item = jnp.minimum(item, items.end.shape[0] - 1)
    begin = first_tile[item] + (entry - (ends - num_splits)[item]) * tiles_per_split[item]
    finish = jnp.minimum(begin + tiles_per_split[item], first_tile[item] + num_tiles[item])
    columns = (items.token[item], items.row[item], first[item], items.end[item], begin, finish, num_splits[item])
    merges = jnp.stack([items.token, ends - num_splits, num_splits], axis=1)
    return Work(jnp.stack(columns, axis=1).astype(jnp.int32), ends[-1:].astype(jnp.int32), merges.astype(jnp.int32))
