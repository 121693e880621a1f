"""Tile sizes of the prefill kernel: how many queries and keys a tile has, how much of it is in shared memory at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.common import tuned
from pallas_kernels.common.budget import MAX_SHARED_BYTES
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import Device
from pallas_kernels.paged_attention.mosaic.query_tiles import TOKENS
from pallas_kernels.paged_attention.mosaic.tiles import WGMMA_ROWS, Cache

MAX_ACCUMULATED = 256
"""Columns of values that one warpgroup's registers can add up."""
SCALES_OF_ROW = 32
"""Float32 numbers of 128 bytes, which a copy to shared memory has to begin at a multiple of."""
BARRIER_BYTES = 1024
REDUCTION_BYTES = 2048
"""What reductions across warps use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """Tile sizes.

    Attributes:
        tile_tokens, tile_heads: tokens, a multiple of 8, and query heads of one KV head that are computed together.
        tile_keys: keys of a tile, a multiple of 64.
        num_stages: tiles of keys and of values in shared memory.
        num_raw_stages: of a cache of one-byte numbers, tiles as they lie in the pools, which become the stages' bfloat16.
        splits_values: the two computing warpgroups have the same 64 rows and half the columns of the values each; else 64 rows each.
        output_in_queries: the output takes the queries' place in shared memory; else the next queries arrive while it is written.
        compute_registers, fetch_registers: of each thread of the two computing warpgroups, and of the one that fetches.
    """

    tile_tokens: int
    tile_heads: int
    tile_keys: int
    num_stages: int
    num_raw_stages: int
    splits_values: bool
    output_in_queries: bool
    compute_registers: int
    fetch_registers: int

    @property
    def num_row_groups(self) -> int:
        """Of 64 rows of queries."""
        return 1 if self.splits_values else 2


def pick_prefill_config(cache: Cache, group: int, num_tokens: int, dtype: Any, device: Device) -> PrefillConfig:
    """A pure function of what does not change a row's result: how queries are packed into rows of the products does not.

    Args:
        group: query heads per KV head.
        num_tokens: of the batch; tiles are not longer.
        dtype: of the output.

    Raises:
        UnsupportedByKernel: not even one tile fits into shared memory.
    """
    shape = {"key_dim": cache.key_dim, "value_dim": cache.value_dim, "group": group, "block_size": cache.block_size}
    found = tuned.lookup("paged_attention", device.kind, tuned.key("prefill", dtype=cache.dtype, latent=int(cache.is_latent), **shape))
    if found is not None:
        return PrefillConfig(**found)
    splits_values = cache.value_dim > MAX_ACCUMULATED
    tile_heads, tile_tokens = _packed(group, WGMMA_ROWS if splits_values else 2 * WGMMA_ROWS)
    tile_tokens = min(tile_tokens, -(-num_tokens // TOKENS) * TOKENS)
    largest_tile = 128 if max(cache.key_dim, cache.value_dim) <= 128 and not cache.has_scales else 64
    # To widen numbers takes registers as well; three warpgroups have 504 together.
    widening = (224, 56) if max(cache.key_dim, cache.value_dim) > 128 else (216, 72)
    compute_registers, fetch_registers = widening if cache.has_scales else (232, 40)
    for num_stages, output_in_queries in ((4, False), (3, False), (2, False), (2, True), (1, True)):
        config = PrefillConfig(
            tile_tokens=tile_tokens,
            tile_heads=tile_heads,
            tile_keys=largest_tile,
            num_stages=num_stages,
            num_raw_stages=2 if cache.has_scales else 0,
            splits_values=splits_values,
            output_in_queries=output_in_queries,
            compute_registers=compute_registers,
            fetch_registers=fetch_registers,
        )
        if shared_bytes(cache, config, dtype) <= MAX_SHARED_BYTES:
            return config
    raise UnsupportedByKernel(f"a tile of keys and values {cache.key_dim}, {cache.value_dim} does not fit into {MAX_SHARED_BYTES} bytes")


def _packed(group: int, num_rows: int) -> tuple[int, int]:
    """Heads, an equal part of the group, and their tokens in so many rows: as many heads, whose tokens see the same keys, as do not
    leave an eighth of the rows more empty than need be."""
    parts = [heads for heads in range(1, group + 1) if group % heads == 0 and heads * TOKENS <= num_rows]
    packed = [(heads, num_rows // heads // TOKENS * TOKENS) for heads in parts]
    filled = max(heads * tokens for heads, tokens in packed)
    return max((heads, tokens) for heads, tokens in packed if 8 * heads * tokens >= 7 * filled)


def shared_bytes(cache: Cache, config: PrefillConfig, dtype: Any) -> int:
    """Shared memory that the prefill kernel allocates, each array at a multiple of 1024 bytes."""
    rows = config.num_row_groups * WGMMA_ROWS
    queries, output = rows * cache.key_dim * 2, rows * cache.value_dim * jnp.dtype(dtype).itemsize
    keys, raw_keys = config.num_stages * config.tile_keys, config.num_raw_stages * config.tile_keys
    scales = 1 if cache.is_latent else 2
    run = min(config.tile_keys, cache.block_size)
    raw_scales = raw_keys // run * max(run, SCALES_OF_ROW) * 4
    arrays = [
        *([max(queries, output)] if config.output_in_queries else [queries, output]),
        keys * cache.key_dim * 2,
        0 if cache.is_latent else keys * cache.value_dim * 2,
        *([4 * keys] * scales if cache.has_scales else []),
        raw_keys * cache.key_dim,
        0 if cache.is_latent else raw_keys * cache.value_dim,
        *([raw_scales] * scales if cache.has_scales else []),
        BARRIER_BYTES,
        REDUCTION_BYTES,
    ]
    return sum(-(-size // 1024) * 1024 for size in arrays)
