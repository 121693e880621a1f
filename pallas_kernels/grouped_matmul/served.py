"""Grouped products at the shapes of models that are served."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.served import Case


def cases(is_tiny: bool) -> list[Case]:
    """Experts of Qwen3-30B-A3B."""
    if is_tiny:
        return [_grouped("tokens_4", 4, num_experts=4, per_token=2, num_outputs=64, num_inputs=64)]
    return [
        _grouped(f"{name}_{tokens}", tokens, num_experts=128, per_token=8, num_outputs=outputs, num_inputs=inputs)
        for tokens in (1, 32, 256, 4096)
        for name, outputs, inputs in (("gate_up", 1536, 2048), ("down", 2048, 768))
    ]


def _grouped(name: str, num_tokens: int, *, num_experts: int, per_token: int, num_outputs: int, num_inputs: int) -> Case:
    """Every token draws its experts at random; tiles are as `layers.moe` makes them."""
    num_pairs = num_tokens * per_token
    tile_rows = next(rows for rows in (8, 16, 32, 64) if rows * num_experts >= num_pairs or rows == 64)
    while tile_rows in (64, 128) and 4 * tile_rows * num_experts <= num_pairs:
        tile_rows *= 2
    draws = np.random.default_rng(0)
    chosen = np.concatenate([draws.permutation(num_experts)[:per_token] for _ in range(num_tokens)])
    tiles_of = -(-np.bincount(chosen, minlength=num_experts) // tile_rows)
    begun = min(num_experts, num_pairs)
    num_tiles = begun + (num_pairs - begun) // tile_rows
    tile_expert = np.repeat(np.arange(num_experts + 1), [*tiles_of, num_tiles - tiles_of.sum()]).astype(np.int32)

    def make(key: jax.Array) -> dict[str, Any]:
        x_key, weight_key = jax.random.split(key)
        return {
            "x": jax.random.normal(x_key, (num_tiles, tile_rows, num_inputs), jnp.bfloat16),
            "weight": jax.random.normal(weight_key, (num_experts, num_outputs, num_inputs), jnp.bfloat16),
            "tile_expert": jnp.asarray(tile_expert),
        }

    used = math.prod((int((tiles_of > 0).sum()), num_outputs, num_inputs, 2))
    rows = num_tiles * tile_rows
    return Case(
        operation="grouped_matmul",
        name=name,
        make=make,
        static={},
        floor_bytes=used + rows * (2 * num_inputs + 4 * num_outputs),
        floor_flops=2 * num_pairs * num_outputs * num_inputs,
        sizes={"num_pairs": num_pairs, "num_experts": num_experts, "chosen": np.bincount(chosen, minlength=num_experts).tolist()},
    )
