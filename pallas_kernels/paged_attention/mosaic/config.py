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
        tile_heads: query heads that one thread block computes for a KV head, a multiple of 8.
        tile_keys: keys of a tile, a multiple of 64.
        num_stages: tiles in shared memory.
        num_query_slots: queries in shared memory; with two the next row's are fetched early.
        min_split_keys, max_splits: a row is split into at most `max_splits` parts, of at least `min_split_keys` keys.
        blocks_per_core: thread blocks that are to share a core.
    """

    tile_heads: int
    tile_keys: int
    num_stages: int
    num_query_slots: int
    min_split_keys: int
    max_splits: int
    blocks_per_core: int


def head_tiles(cache: Cache, group: int) -> int:
    """Into how many equal parts the query heads of a KV head are divided: the accumulator of a part fits into the registers."""
    most = min(64, 8192 // cache.value_columns)
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)


def pick_config(cache: Cache, group: int, device: Device) -> Config:
    """A pure function of what does not depend on the batch.

    Args:
        group: query heads per KV head.

    Raises:
        UnsupportedByKernel: two tiles do not fit into shared memory.
    """
    shape = {"key_dim": cache.key_dim, "value_dim": cache.value_dim, "group": group, "block_size": cache.block_size}
    found = tuned.lookup("paged_attention", device.kind, tuned.key("decode", dtype=cache.dtype, latent=int(cache.is_latent), **shape))
    if found is not None:
        return Config(**found)
    live = group // head_tiles(cache, group)
    tile_heads = -(-live // 8) * 8
    tile_keys = 128 if cache.bytes_per_key <= 256 and tile_heads <= 16 and not cache.copies_values else 64
    split_bytes = (8 * live * cache.value_dim + 2 * tile_heads * cache.key_dim) * head_tiles(cache, group)
    split_keys = max(MIN_SPLIT_KEYS, math.ceil(split_bytes / (MAX_PARTIAL_SHARE * cache.bytes_per_key)))
    registers = (cache.value_columns + 3 * tile_keys) * tile_heads // 128
    for blocks_per_core, num_stages, num_query_slots in ((2, 4, 2), (2, 3, 2), (1, 4, 2), (1, 3, 2), (1, 2, 2), (1, 2, 1)):
        if blocks_per_core > 1 and registers > MOST_SHARED_REGISTERS:
            continue
        config = Config(
            tile_heads=tile_heads,
            tile_keys=tile_keys,
            num_stages=num_stages,
            num_query_slots=num_query_slots,
            min_split_keys=-(-split_keys // tile_keys) * tile_keys,
            max_splits=MAX_SPLITS,
            blocks_per_core=blocks_per_core,
        )
        limit = min(MAX_SHARED_BYTES, SHARED_BYTES_PER_CORE // blocks_per_core - RESERVED_BYTES)
        if shared_bytes(cache, config) <= limit:
            return config
    raise UnsupportedByKernel(f"two tiles of keys and values {cache.key_dim}, {cache.value_dim} do not fit into {MAX_SHARED_BYTES} bytes")


def shared_bytes(cache: Cache, config: Config) -> int:
    """Shared memory that the decode kernel allocates, each array at a multiple of 1024 bytes."""
    itemsize = 1 if cache.has_scales else 2
    keys = config.tile_keys * config.num_stages
    heads = config.tile_heads
    arrays = [
        keys * cache.key_dim * itemsize,
        0 if cache.is_latent else keys * cache.value_dim * itemsize,
        *[4 * keys if cache.has_scales else 0] * (1 if cache.is_latent else 2),
        config.tile_keys * cache.value_columns * 2 if cache.copies_values else 0,
        config.num_query_slots * heads * cache.key_dim * 2,
        heads * config.tile_keys * 2,  # weights
        heads * cache.value_columns * 2,  # an output
        heads * cache.value_columns * 4,  # a partial result
        4 * heads,  # its maximum
        4 * heads,  # and sum
        8 * (2 * config.num_stages + 2 * config.num_query_slots),  # barriers
        REDUCTION_BYTES,
    ]
    assert config.tile_keys % WGMMA_ROWS == 0
    return sum(-(-size // 1024) * 1024 for size in arrays)
