"""Sorting (token, expert) pairs into tiles of one expert each."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 64
"""XLA's CPU backend multiplies fewer than 8 int8 rows slowly; at 64 a weight is read seldom enough."""
HOPPER_TILE_ROWS = 256
"""With a GPU's matrix units it is not: what they wait for is the weight, from the cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Tiles:
    """Where each (token, expert) pair stands: A tiles of U rows, every tile of one expert, in the order of experts."""

    token: Int32[Array, "A U"]
    """The token of each row; rows past an expert's last pair repeat some token."""
    expert: Int32[Array, "A"]
    """X: the tile is empty."""
    place: Int32[Array, "T J"]
    """Row of each token's j-th expert, tiles one after another; A * U for a token that goes nowhere."""


def pick_tile_rows(num_pairs: int, num_experts: int, max_rows: int = MAX_TILE_ROWS) -> int:
    """A power of two near the number of pairs that an expert has on average; beyond 64 a quarter of it, for the sake of the padding."""
    rows = MIN_TILE_ROWS
    while rows < MAX_TILE_ROWS and rows * num_experts < num_pairs:
        rows *= 2
    while rows < max_rows and 4 * rows * num_experts <= num_pairs:
        rows *= 2
    return rows


def sort_into_tiles(experts: Int32[Array, "T J"], num_experts: int, tile_rows: int) -> Tiles:
    """Sort the pairs by expert and pad each expert's run to whole tiles; expert X is none.

    There are as many tiles as the pairs need at worst: m = min(X, pairs) experts begin a tile each, and every further one
    is full.
    """
    num_pairs = experts.size
    num_begun = min(num_experts, num_pairs)
    num_tiles = num_begun + (num_pairs - num_begun) // tile_rows
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # [pairs]
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    first_pair = jnp.cumsum(counts, dtype=jnp.int32) - counts
    tiles_of_expert = (counts + tile_rows - 1) // tile_rows
    end_tile = jnp.cumsum(tiles_of_expert, dtype=jnp.int32)
    first_tile = end_tile - tiles_of_expert
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # Every tile against every expert at once: to search in steps would be a loop, and each of its turns several launches on a GPU.
    expert = jnp.searchsorted(end_tile, tile, side="right", method="compare_all").astype(jnp.int32)
    shift = (first_pair - first_tile * tile_rows).at[expert].get(mode="clip")  # from a row to its place in the sorted pairs
    row = tile[:, None] * tile_rows + jnp.arange(tile_rows, dtype=jnp.int32)[None, :]
    token = order.at[row + shift[:, None]].get(mode="clip") // experts.shape[1]
    rank = jnp.zeros(num_pairs, jnp.int32).at[order].set(jnp.arange(num_pairs, dtype=jnp.int32))
    place = rank - (first_pair - first_tile * tile_rows).at[flat].get(mode="clip")
    place = jnp.where(flat < num_experts, place, num_tiles * tile_rows)
    return Tiles(token, expert, place.reshape(experts.shape))
