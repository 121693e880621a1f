"""Attention of rows with several queries: prompts and chunks of them, on tensor cores that keys and values reach by bulk copies."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common import mosaic
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.paged_attention.mosaic import tiles
from pallas_kernels.paged_attention.mosaic.prefill_config import REDUCTION_BYTES, SCALES_OF_ROW, PrefillConfig, pick_prefill_config
from pallas_kernels.paged_attention.mosaic.prefill_fetch import BYTES_AT_ONCE
from pallas_kernels.paged_attention.mosaic.prefill_kernel import NUM_COMPUTING, Operand, Options, Shared, kernel
from pallas_kernels.paged_attention.mosaic.query_tiles import TOKENS, query_tiles, spans


def prefill(
    q: Float[Array, "T H D"],
    pools: tiles.Pools,
    block_tables: Int32[Array, "B P"],
    query_start_loc: Int32[Array, "B1"],
    context_lens: Int32[Array, "B"],
    sinks: Float32[Array, "H"] | None,
    output: Any,
    *,
    cache: tiles.Cache,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: bool,
    config: PrefillConfig | None = None,
) -> None:
    """Write the outputs of all rows with two queries or more into `output`, a mutable reference to [T, H, Dv or more columns].

    Other tokens' outputs stay as they are. A row's bits are the same in any batch.

    Raises:
        UnsupportedByKernel: a scale that is not positive, or no configuration for these sizes.
    """
    num_tokens, num_heads, _ = q.shape
    if not scale > 0:
        raise UnsupportedByKernel(f"scale must be positive, got {scale}")
    config = config or pick_prefill_config(cache, num_heads // cache.num_kv_heads, num_tokens, output.dtype, mosaic.device())
    work = query_tiles(query_start_loc, context_lens, num_tokens, config.tile_tokens, config.tile_keys, window)
    num_parts = num_heads // config.tile_heads
    options = Options(
        cache=cache,
        config=config,
        num_parts=num_parts,
        num_blocks=min(work.tiles.shape[0] * num_parts, mosaic.device().num_cores),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    queries = jnp.pad(q.astype(tiles.PRODUCT_DTYPE), ((0, -num_tokens % TOKENS), (0, 0), (0, 0)))
    mosaic.kernel(
        functools.partial(kernel, options=options, pools=pools),
        interpret=interpret,
        out_type=(),
        grid=(options.num_blocks,),
        grid_names=("block",),
        num_threads=NUM_COMPUTING + 1,
        thread_name="warpgroup",
        scratch_types=[_shared_types(options, output.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES),
        kernel_name="paged_attention_prefill",
    )(*work, block_tables, queries, *_sinks_by_row(sinks, options), *pools.present(), output)


def _sinks_by_row(sinks: Array | None, options: Options) -> list[Array]:
    """Base-2 logits of each part, [parts, rows of a tile]."""
    if sinks is None:
        return []
    config = options.config
    by_head = sinks.astype(jnp.float32).reshape(options.num_parts, config.tile_heads) * tiles.LOG2E
    by_row = jnp.repeat(by_head, config.tile_tokens, axis=1)
    return [jnp.pad(by_row, ((0, 0), (0, config.num_row_groups * tiles.WGMMA_ROWS - by_row.shape[1])))]


def _shared_types(options: Options, dtype: Any) -> Shared:
    cache, config = options.cache, options.config
    rows = (config.num_row_groups, tiles.WGMMA_ROWS)
    num_blocks = config.tile_keys // min(config.tile_keys, cache.block_size)

    def swizzled(shape: tuple[int, ...], dim: int, dtype: Any) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=tiles.operand_transforms(dim, dtype))

    def operand(columns: int, dim: int) -> Operand:
        stages = (config.num_stages, config.tile_keys)
        return Operand(
            vectors=swizzled((*stages, columns), dim, tiles.PRODUCT_DTYPE),
            scales=plgpu.SMEM(stages, jnp.float32) if cache.has_scales else None,
            full=plgpu.Barrier(num_arrivals=1 if cache.has_scales else num_blocks, num_barriers=config.num_stages),
            free=plgpu.Barrier(num_arrivals=NUM_COMPUTING, num_barriers=config.num_stages),
        )

    queries = swizzled((*rows, cache.key_dim), cache.keys_in_row, tiles.PRODUCT_DTYPE)
    boxes = swizzled((*rows, cache.value_dim), cache.value_dim, dtype)
    single_rows = plgpu.SMEM((*rows, cache.value_dim), dtype)
    return Shared(
        queries=None if config.output_in_queries else queries,
        places=plgpu.RefUnion(*([queries] if config.output_in_queries else []), boxes, single_rows),
        keys=operand(cache.key_dim, cache.keys_in_row),
        values=None if cache.is_latent else operand(cache.value_dim, cache.value_dim),
        raw=_raw_types(cache, config) if cache.has_scales else None,
        landed=None if cache.has_scales else plgpu.Barrier(num_arrivals=num_blocks, num_barriers=config.num_stages),
        query_full=plgpu.Barrier(num_arrivals=len(spans(config.tile_tokens, config.tile_heads))),
        query_free=plgpu.Barrier(num_arrivals=NUM_COMPUTING),
        turn=plgpu.Barrier(num_arrivals=NUM_COMPUTING),
    )


def _raw_types(cache: tiles.Cache, config: PrefillConfig) -> tiles.Stages:
    """Tiles as they lie in the pools. A block's scales have a row of their own, because a copy has to begin at a multiple of 128 bytes."""
    stages = (config.num_raw_stages, config.tile_keys)
    run = min(config.tile_keys, cache.block_size)

    def vectors(dim: int) -> Any:
        # Swizzled no wider than the parts that are made bfloat16 together.
        return plgpu.SMEM(
            (*stages, dim), jnp.dtype(cache.dtype), transforms=tiles.operand_transforms(math.gcd(dim, BYTES_AT_ONCE), cache.dtype)
        )

    scales = plgpu.SMEM((stages[0], stages[1] // run, max(run, SCALES_OF_ROW)), jnp.float32)
    num_copies = stages[1] // run * (2 if cache.is_latent else 4)
    return tiles.Stages(
        keys=vectors(cache.key_dim),
        values=None if cache.is_latent else vectors(cache.value_dim),
        key_scales=scales,
        value_scales=None if cache.is_latent else scales,
        full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=config.num_raw_stages),
        free=None,
    )
