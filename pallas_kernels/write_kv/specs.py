"""Named argument sets of write_kv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.one_byte import has_scales

MAX_ROW_ERROR = 0.0
"""A copy is exact, and so is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """T tokens into two pools of N blocks; pools of one byte a number have scales. Without `value_dim` there are no values."""

    name: str
    num_tokens: int
    num_blocks: int = 8
    num_heads: int = 2
    block_size: int = 4
    head_dim: int = 16
    value_dim: int | None = 16
    dtype: str = "float32"
    cache_dtype: str = "float32"


SPECS = (
    Spec(name="one_token", num_tokens=1),
    Spec(name="half_the_pool", num_tokens=16),
    Spec(name="one_head", num_tokens=5, num_heads=1),
    Spec(name="values_are_wider", num_tokens=5, value_dim=32),
    Spec(name="bfloat16", num_tokens=16, cache_dtype="bfloat16"),
    Spec(name="int8", num_tokens=16, head_dim=64, value_dim=64, dtype="bfloat16", cache_dtype="int8"),
    Spec(name="int8_one_token", num_tokens=1, num_heads=1, cache_dtype="int8"),
    Spec(name="float8", num_tokens=16, head_dim=64, value_dim=64, cache_dtype="float8_e4m3fn"),
    Spec(name="latent", num_tokens=3, num_heads=1, head_dim=192, value_dim=None, dtype="bfloat16", cache_dtype="bfloat16"),
    Spec(name="latent_int8", num_tokens=3, num_heads=1, head_dim=192, value_dim=None, cache_dtype="int8"),
)


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, Any]:
    """Full pools, new vectors (one of zeros), distinct slots, and one slot past the end, which must be dropped."""
    draws = np.random.default_rng(seed)
    slots = draws.permutation(spec.num_blocks * spec.block_size)[: spec.num_tokens].astype(np.int32)
    slots[-1] = spec.num_blocks * spec.block_size if spec.num_tokens > 1 else slots[-1]
    arguments: dict[str, Any] = {"slot_mapping": slots, "v": None, "v_blocks": None}
    for name, head_dim in (("k", spec.head_dim), ("v", spec.value_dim)):
        if head_dim is None:
            continue
        new = draws.standard_normal((spec.num_tokens, spec.num_heads, head_dim)).astype(jnp.dtype(spec.dtype))
        new[1:2] = 0
        pool = (spec.num_heads, spec.num_blocks, spec.block_size, head_dim)
        arguments |= {name: new, f"{name}_blocks": (100 * draws.standard_normal(pool)).astype(jnp.dtype(spec.cache_dtype))}
        if has_scales(spec.cache_dtype):
            arguments[f"{name}_scales"] = draws.uniform(0.001, 0.1, pool[:3]).astype(np.float32)
    return arguments
