"""Tile sizes of the decode kernel: how many keys a tile has, how many tiles are on their way at once, when a row is split."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pallas_kernels.common import tuned
from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device
from pallas_kernels.paged_attention.mosaic.tiles import WGMMA_ROWS, Cache

SHARED_BYTES_PER_CORE = 233_472
RESERVED_BYTES = 1024
"""Of each thread block's shared memory, by the driver."""
REDUCTION_BYTES = 2048
"""What reductions across warps use."""
MOST_SHARED_REGISTERS = 48
"""Of a thread, for what grows with the heads: with more, two thread blocks do not find room on a core."""
MAX_SPLITS = 16
MIN_SPLIT_KEYS = 512
MAX_PARTIAL_SHARE = 0.04
"""Of the bytes of a split's keys, at most this much may be spent on its partial result, written and read, and on its queries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Tile sizes.

    Attributes:
        tile_keys: keys of a tile, a multiple of 64.
        num_stages: tiles in shared memory.
        num_query_slots: queries in shared memory; with two the next row's are fetched early.
        min_split_keys, max_splits: a row is split into at most `max_splits` parts, of at least `min_split_keys` keys.
        blocks_per_core: thread blocks that are to share a core.
    """

    tile_keys: int
    num_stages: int
    num_query_slots: int
    min_split_keys: int
    max_splits: int
    blocks_per_core: int


CANDIDATES = tuple(
    Config(
        tile_keys=tile_keys,
        num_stages=num_stages,
        num_query_slots=2,
        min_split_keys=min_split_keys,
        max_splits=MAX_SPLITS,
        blocks_per_core=blocks_per_core,
    )
    for tile_keys in (64, 128)
    for num_stages in (2, 3, 4, 6)
    for min_split_keys in (512, 1024)
    for blocks_per_core in (1, 2, 3)
)
"""What the tuner tries; those that a shape has no room for are refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """How the query heads of a token are divided among thread blocks.

    Attributes:
        parts: of all heads of a token, equal ones, each within one KV head's.
        live: query heads of a part.
        tile: `live` rounded up to what a product has as columns.
    """

    parts: int
    live: int
    tile: int


def heads_of(cache: Cache, group: int) -> Heads:
    """Parts as large as an accumulator in registers allows. `group`: query heads per KV head."""
    most = min(64, 8192 // cache.value_columns)
    parts = next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)
    return Heads(parts=parts * cache.num_kv_heads, live=group // parts, tile=-(-group // parts // 8) * 8)


def pick_config(cache: Cache, group: int, device: Device) -> Config:
    """A pure function of what does not depend on the batch.

    Args:
        group: query heads per KV head.

    Raises:
        UnsupportedByKernel: two tiles, or what the device's table says, do not fit into shared memory.
    """
    shape = {"key_dim": cache.key_dim, "value_dim": cache.value_dim, "group": group, "block_size": cache.block_size}
    found = tuned.lookup("paged_attention", device.kind, tuned.key("decode", dtype=cache.dtype, latent=int(cache.is_latent), **shape))
    heads = heads_of(cache, group)
    if found is not None:
        config = Config(**found)
        if not fits(cache, config, heads):
            raise UnsupportedByKernel(f"{config} does not fit into shared memory")
        return config
    tile_keys = 128 if cache.bytes_per_key <= 256 and heads.tile <= 16 and not cache.copies_values else 64
    parts_per_head = heads.parts // cache.num_kv_heads
    split_bytes = (8 * heads.live * cache.value_dim + 2 * heads.tile * cache.key_dim) * parts_per_head
    split_keys = max(MIN_SPLIT_KEYS, math.ceil(split_bytes / (MAX_PARTIAL_SHARE * cache.bytes_per_key)))
    registers = (cache.value_columns + 3 * tile_keys) * heads.tile // 128
    for blocks_per_core, num_stages, num_query_slots in ((2, 4, 2), (2, 3, 2), (1, 4, 2), (1, 3, 2), (1, 2, 2), (1, 2, 1)):
        if blocks_per_core > 1 and registers > MOST_SHARED_REGISTERS:
            continue
        config = Config(
            tile_keys=tile_keys,
            num_stages=num_stages,
            num_query_slots=num_query_slots,
            min_split_keys=-(-split_keys // tile_keys) * tile_keys,
            max_splits=MAX_SPLITS,
            blocks_per_core=blocks_per_core,
        )
        if fits(cache, config, heads):
            return config
    raise UnsupportedByKernel(f"two tiles of keys and values {cache.key_dim}, {cache.value_dim} do not fit into {MAX_SHARED_BYTES} bytes")


def fits(cache: Cache, config: Config, heads: Heads) -> bool:
    """Whether as many thread blocks as the configuration says have room on a core."""
    limit = min(MAX_SHARED_BYTES, SHARED_BYTES_PER_CORE // config.blocks_per_core - RESERVED_BYTES)
    return shared_bytes(cache, config, heads) <= limit


def shared_bytes(cache: Cache, config: Config, heads: Heads) -> int:
    """Shared memory that the decode kernel allocates, each array at a multiple of 1024 bytes."""
    itemsize = 1 if cache.has_scales else 2
    keys = config.tile_keys * config.num_stages
    columns = heads.tile
    arrays = [
        keys * cache.key_dim * itemsize,
        0 if cache.is_latent else keys * cache.value_dim * itemsize,
        *[4 * keys if cache.has_scales else 0] * (1 if cache.is_latent else 2),
        config.tile_keys * cache.value_columns * 2 if cache.copies_values else 0,
        config.num_query_slots * columns * cache.key_dim * 2,
        columns * config.tile_keys * 2,  # weights
        columns * cache.value_columns * 2,  # an output
        columns * cache.value_columns * 4,  # a partial result
        4 * columns,  # its maximum
        4 * columns,  # and sum
        8 * (2 * config.num_stages + 2 * config.num_query_slots),  # barriers
        REDUCTION_BYTES,
    ]
    assert config.tile_keys % WGMMA_ROWS == 0
    return sum(-(-size // 1024) * 1024 for size in arrays)
