"""Paged attention on Hopper in Mosaic GPU: tokens of rows that have one query by `decode`, rows with several by `prefill`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common import mosaic
from pallas_kernels.paged_attention.mosaic.config import CANDIDATES, Config, pick_config
from pallas_kernels.paged_attention.mosaic.decode import decode_items, options_of
from pallas_kernels.paged_attention.mosaic.prefill import prefill
from pallas_kernels.paged_attention.mosaic.splits import every_token, rows_of_one
from pallas_kernels.paged_attention.mosaic.tiles import Cache, Pools

__all__ = ["CANDIDATES", "Config", "paged_attention", "pick_config"]


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
    interpret: bool = False,
) -> Float[Array, "T H Dv"]:
    """See `api.paged_attention`.

    With at most one token per row of the batch every token is decoded by itself, which is what buckets for decoding look like;
    else rows with one query are decoded and rows with several go tile by tile. The bits of a row do not depend on the other rows.

    Args:
        interpret: where there is no Hopper GPU, run in Pallas' GPU interpreter instead of refusing.

    Raises:
        UnsupportedByKernel: another device, a dtype, block size or dim that the kernels do not have.
    """
    cache = Cache.of(k_blocks, v_blocks, value_dim)
    num_tokens, num_heads, _ = q.shape
    group = num_heads // cache.num_kv_heads
    options = options_of(cache, pick_config(cache, group, mosaic.device()), group, scale, soft_cap, sinks is not None)
    pools = Pools(k_blocks, v_blocks, k_scales, v_scales)
    shape = (num_tokens, num_heads, cache.value_columns)
    is_decoding = num_tokens <= context_lens.shape[0]
    if is_decoding:
        items = every_token(num_tokens, query_start_loc, context_lens)
        output = jax.new_ref(lax.empty(shape, q.dtype))
    else:
        items = rows_of_one(query_start_loc, context_lens)
        output = jax.new_ref(jnp.zeros(shape, q.dtype))  # tokens past the last row are nobody's
        rows = (query_start_loc, context_lens, sinks, output)
        prefill(q, pools, block_tables, *rows, cache=cache, scale=scale, window=window, soft_cap=soft_cap, interpret=interpret)
    decode_items(q, pools, block_tables, items, sinks, output, options, window=window, interpret=interpret)
    return output[...][:, :, : cache.value_dim]
