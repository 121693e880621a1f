"""Attention at the shapes of models that are served."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.served import Case, random_numbers

LLAMA_3_8B = {"heads": 32, "kv_heads": 8, "head_dim": 128}
QWEN3_30B = {"heads": 32, "kv_heads": 4, "head_dim": 128}
DEEPSEEK_V2_LITE = {"heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512}


def cases(is_tiny: bool) -> list[Case]:
    """Decode rows and prompts."""
    if is_tiny:
        small = {"heads": 4, "kv_heads": 2, "head_dim": 64}
        return [_attention("decode_2x40", ((1, 40),) * 2, **small), _attention("prefill_16", ((16, 16),), **small)]
    made = [_attention(f"decode_{rows}x{keys}", ((1, keys),) * rows, **LLAMA_3_8B) for rows, keys in ((32, 2048), (256, 2048), (32, 512))]
    made += [
        _attention("prefill_4096", ((4096, 4096),), **LLAMA_3_8B),
        _attention("decode_1x8192", ((1, 8192),), **LLAMA_3_8B),
        _attention("decode_32x2048_int8", ((1, 2048),) * 32, cache="int8", **LLAMA_3_8B),
        _attention("decode_256x256", ((1, 256),) * 256, **LLAMA_3_8B),
        _attention("decode_64x2048_qwen3_30b", ((1, 2048),) * 64, **QWEN3_30B),
        _attention("decode_32x2048_latent", ((1, 2048),) * 32, **DEEPSEEK_V2_LITE),
        _attention("decode_32x2048_block_64", ((1, 2048),) * 32, block_size=64, is_compared=False, **LLAMA_3_8B),
        _attention("prefill_8x512", ((512, 512),) * 8, **LLAMA_3_8B),
        _attention("prefill_512_of_8192", ((512, 8192),), is_compared=False, **LLAMA_3_8B),
        _attention("mixed_64x2048_and_1024", ((1, 2048),) * 64 + ((1024, 1024),), is_compared=False, **LLAMA_3_8B),
    ]
    return made


def _attention(
    name: str,
    rows: tuple[tuple[int, int], ...],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    block_size: int = 16,
    cache: str = "bfloat16",
    is_compared: bool = True,
) -> Case:
    """Rows of (queries, keys); with `value_dim` the cache is latent."""
    is_latent, value_dim = value_dim is not None, value_dim or head_dim
    blocks_of = [-(-keys // block_size) for _, keys in rows]
    num_blocks, num_queries = sum(blocks_of) + 1, sum(queries for queries, _ in rows)

    def make(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 5)
        order = 1 + jax.random.permutation(keys[0], num_blocks - 1).astype(jnp.int32)
        starts = np.cumsum([0, *blocks_of])
        index = np.zeros((len(rows), max(blocks_of)), np.int32)
        for row, count in enumerate(blocks_of):
            index[row, :count] = starts[row] + np.arange(count)
        pool = (kv_heads, num_blocks, block_size)
        arrays = {
            "q": jax.random.normal(keys[1], (num_queries, heads, head_dim), jnp.bfloat16),
            "k_blocks": random_numbers(keys[2], (*pool, head_dim), cache),
            "v_blocks": None if is_latent else random_numbers(keys[3], (*pool, value_dim), cache),
            "block_tables": order[index],
            "query_start_loc": jnp.asarray(np.cumsum([0, *(queries for queries, _ in rows)]), jnp.int32),
            "context_lens": jnp.asarray([context for _, context in rows], jnp.int32),
        }
        if cache == "int8":
            arrays |= {f"{name}_scales": jax.random.uniform(keys[4], pool, jnp.float32, 0.005, 0.02) for name in "kv"}
        return arrays

    itemsize, num_keys = jnp.dtype(cache).itemsize, sum(context for _, context in rows)
    per_key = kv_heads * (head_dim + (0 if is_latent else value_dim)) * itemsize + (8 * kv_heads if cache == "int8" else 0)
    visible = sum(queries * keys - queries * (queries - 1) // 2 for queries, keys in rows)
    return Case(
        operation="paged_attention",
        name=name,
        make=make,
        static={"scale": head_dim**-0.5, "value_dim": value_dim if is_latent else None},
        floor_bytes=num_keys * per_key + num_queries * heads * (head_dim + value_dim) * 2,
        floor_flops=2 * visible * heads * (head_dim + value_dim),
        sizes={"rows": rows, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim, "cache": cache},
        is_compared=is_compared,
    )
