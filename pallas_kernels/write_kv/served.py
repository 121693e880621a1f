"""Writes at the shapes of models that are served."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.served import Case, random_numbers


def cases(is_tiny: bool) -> list[Case]:
    """Tokens of a step into a pool."""
    if is_tiny:
        return [_write("tokens_4", 4, kv_heads=2, num_blocks=4, head_dim=64, cache="bfloat16")]
    return [
        _write(f"tokens_{tokens}_{cache}", tokens, kv_heads=8, num_blocks=8192, head_dim=128, cache=cache)
        for tokens in (32, 256, 4096)
        for cache in ("bfloat16", "int8")
    ]


def _write(name: str, num_tokens: int, *, kv_heads: int, num_blocks: int, head_dim: int, cache: str, block_size: int = 16) -> Case:
    pool = (kv_heads, num_blocks, block_size)

    def make(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, 5)
        slots = jax.random.permutation(keys[0], num_blocks * block_size)[:num_tokens].astype(jnp.int32)
        arrays = {
            "k_blocks": random_numbers(keys[1], (*pool, head_dim), cache),
            "v_blocks": random_numbers(keys[2], (*pool, head_dim), cache),
            "k": jax.random.normal(keys[3], (num_tokens, kv_heads, head_dim), jnp.bfloat16),
            "v": jax.random.normal(keys[4], (num_tokens, kv_heads, head_dim), jnp.bfloat16),
            "slot_mapping": slots,
        }
        return arrays | ({f"{name}_scales": jnp.ones(pool, jnp.float32) for name in "kv"} if cache == "int8" else {})

    def feed(arguments: dict[str, Any], result: tuple[Any, ...]) -> dict[str, Any]:
        return arguments | dict(zip(("k_blocks", "v_blocks", "k_scales", "v_scales"), result, strict=True))

    vectors, itemsize = 2 * num_tokens * kv_heads, jnp.dtype(cache).itemsize
    return Case(
        operation="write_kv",
        name=name,
        make=make,
        static={},
        floor_bytes=vectors * head_dim * (2 + itemsize) + (4 * vectors if cache == "int8" else 0) + 4 * num_tokens,
        feed=feed,
    )
