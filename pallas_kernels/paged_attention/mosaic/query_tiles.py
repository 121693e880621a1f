"""Which queries are computed together when rows have several: tiles of a row's tokens, longest first.

A tile's tokens begin at a multiple of 8 of the batch, for that is where bulk copies of swizzled rows can begin; so the first tile of a
row may begin with tokens of the row before, and the last end with those of the row after. They are computed along and not written.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

TOKENS = 8
"""What a tile's first token is a multiple of."""
FIELDS = (
    "row",
    "token",
    "first_token",
    "end_token",
    "position",
    "first_key",
    "end_key",
    "first_tile",
    "first_whole",
    "end_whole",
    "end_tile",
)
"""Of a tile. Tokens `first_token` to `end_token` - 1 of those from `token` of the batch on are of table row `row`, and `position` is the
place in that row that token `token` has, or would have. Keys `first_key` to `end_key` - 1 may be read; the row has no more, and before
them is what no query of the tile sees. Tiles of keys `first_tile` to `end_tile` - 1 are seen, of which `first_whole` to `end_whole` - 1
wholly by every query."""


class QueryTiles(NamedTuple):
    """What a kernel reads.

    Attributes:
        tiles: [A, 11], see `FIELDS`; those past `count` mean nothing.
        count: tiles there are.
    """

    tiles: Int32[Array, "A 11"]
    count: Int32[Array, "1"]


def most_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Tiles that there are at most: each row with several queries has one for every `tile_tokens`, and begun ones at its ends."""
    rows = min(num_rows, num_tokens // 2)
    return (num_tokens + rows * (tile_tokens + TOKENS - 2)) // tile_tokens


def query_tiles(
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    num_tokens: int,
    tile_tokens: int,
    tile_keys: int,
    window: int | None,
) -> QueryTiles:
    """The tiles of all rows with two queries or more; those with more tiles of keys come first."""
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    aligned = starts // TOKENS * TOKENS
    per_row = jnp.where(ends - starts > 1, -(-(ends - aligned) // tile_tokens), 0)
    until = jnp.cumsum(per_row).astype(jnp.int32)
    number = jnp.arange(most_tiles(num_tokens, context_lens.shape[0], tile_tokens), dtype=jnp.int32)
    # compare_all: a loop on the device would be many small kernels.
    row = jnp.searchsorted(until, number, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, context_lens.shape[0] - 1)
    token = aligned[row] + (number - until[row] + per_row[row]) * tile_tokens
    first_token = jnp.maximum(starts[row] - token, 0)
    end_token = jnp.minimum(ends[row] - token, tile_tokens)
    position = context_lens[row] - ends[row] + token
    lowest, highest = position + first_token, position + end_token - 1
    first_key = jnp.zeros_like(lowest) if window is None else jnp.maximum(lowest - window + 1, 0)
    first_tile, end_tile = first_key // tile_keys, highest // tile_keys + 1
    whole = first_tile if window is None else -(-jnp.maximum(highest - window + 1, 0) // tile_keys)
    first_whole = jnp.clip(whole, first_tile, end_tile)
    end_whole = jnp.clip((lowest + 1) // tile_keys, first_whole, end_tile)
    fields = (row, token, first_token, end_token, position, first_key, context_lens[row], first_tile, first_whole, end_whole, end_tile)
    count = until[-1:]
    order = _order(jnp.where(number < count, end_tile - first_tile, -1))
    return QueryTiles(jnp.stack(fields, axis=1)[order], count)


def _order(lengths: Int32[Array, "A"]) -> Int32[Array, "A"]:
    """The places of the lengths, longest first, equal ones in order. Few enough that all pairs are compared: a sort is several kernels."""
    place = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    is_before = (lengths[None, :] > lengths[:, None]) | ((lengths[None, :] == lengths[:, None]) & (place[None, :] < place[:, None]))
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank[None, :] == place[:, None], place[None, :], 0), axis=1, dtype=jnp.int32)


class Span(NamedTuple):
    """Consecutive rows of a query tile in shared memory, `warpgroup` rows apart: tokens `token` on of head `head`, both of the tile."""

    warpgroup: int
    row: int
    head: int
    token: int
    length: int


def spans(tile_tokens: int, tile_heads: int, rows: int = 64) -> list[Span]:
    """Where each head's tokens lie: one head after another, cut where one warpgroup's rows end and the next one's begin."""
    found = []
    for head in range(tile_heads):
        start, end = head * tile_tokens, (head + 1) * tile_tokens
        while start < end:
            stop = min(end, (start // rows + 1) * rows)
            found.append(Span(start // rows, start % rows, head, start - head * tile_tokens, stop - start))
            start = stop
    return found
