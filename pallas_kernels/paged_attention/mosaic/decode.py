"""Attention of single tokens: as few operations and registers as possible beside the stream of keys and values.

Keys are the rows of the products and query heads their columns, S^T = K q^T and O^T = V^T P^T: a matrix instruction has 64 rows,
which tiles of keys fill and the few heads of a group would not. As many thread blocks as fit on the device go through the entries
of `splits`; what does not lie in one entry is added up by `merge`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common import mosaic
from pallas_kernels.paged_attention.mosaic import tiles
from pallas_kernels.paged_attention.mosaic.config import REDUCTION_BYTES, Config, heads_of
from pallas_kernels.paged_attention.mosaic.decode_kernel import Options, Shared, kernel
from pallas_kernels.paged_attention.mosaic.merge import merge
from pallas_kernels.paged_attention.mosaic.splits import Items, most_splits, work_of


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
    parts, heads, columns = options.heads.parts, options.heads.tile, cache.value_columns
    num_entries = work.entries.shape[0] if is_split else 1
    partial = jax.new_ref(lax.empty((num_entries, parts, options.heads.live, columns), jnp.float32))
    statistics = jax.new_ref(lax.empty((num_entries, parts, 2, heads), jnp.float32))
    num_blocks = min(work.entries.shape[0] * parts, mosaic.device().num_cores * config.blocks_per_core)
    queries = _by_part(q.astype(tiles.PRODUCT_DTYPE), parts, heads)
    sink_array = _sinks_by_part(sinks, options)
    body = functools.partial(kernel, options=options, pools=pools, num_blocks=num_blocks, is_split=is_split)
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
        merge(work.merges, partial, statistics, output, heads, options.heads.live, interpret=interpret)


def _by_part(q: Array, num_parts: int, tile_heads: int) -> Array:
    """[T, parts, tile_heads, D]: the heads of each part, then zeros."""
    num_tokens, num_heads, dim = q.shape
    live = num_heads // num_parts
    return jnp.pad(q.reshape(num_tokens, num_parts, live, dim), ((0, 0), (0, 0), (0, tile_heads - live), (0, 0)))


def _sinks_by_part(sinks: Array | None, options: Options) -> list[Array]:
    if sinks is None:
        return []
    # Finite, so that zero times a sink is zero.
    by_part = jnp.maximum(sinks.astype(jnp.float32).reshape(options.heads.parts, options.heads.live) * tiles.LOG2E, tiles.MASKED)
    return [jnp.pad(by_part, ((0, 0), (0, options.heads.tile - options.heads.live)))]


def _shared_types(options: Options, dtype: Any) -> Shared:
    cache, config = options.cache, options.config
    heads, keys = options.heads.tile, config.tile_keys
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


def options_of(cache: tiles.Cache, config: Config, group: int, scale: float, soft_cap: float | None, has_sinks: bool) -> Options:
    """Options for so many query heads per KV head."""
    return Options(cache=cache, config=config, heads=heads_of(cache, group), scale=scale, soft_cap=soft_cap, has_sinks=has_sinks)
