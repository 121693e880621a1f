"""Named argument sets of write_kv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

MAX_ROW_ERROR = 0.0
"""A copy is exact, and so are the int8 steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """T tokens into a pool of N blocks; an int8 pool has scales."""

    name: str
    num_tokens: int
    num_blocks: int = 8
    num_heads: int = 2
    block_size: int = 4
    head_dim: int = 8
    cache_dtype: str = "float32"


SPECS = (
    Spec(name="one_token", num_tokens=1),
    Spec(name="half_the_pool", num_tokens=16),
    Spec(name="one_head", num_tokens=5, num_heads=1),
    Spec(name="bfloat16", num_tokens=16, cache_dtype="bfloat16"),
    Spec(name="int8", num_tokens=16, head_dim=64, cache_dtype="int8"),
    Spec(name="int8_one_token", num_tokens=1, num_heads=1, cache_dtype="int8"),
)


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, Any]:
    """A full pool, new vectors (one of zeros), distinct slots, and one slot past the end, which must be dropped."""
    draws = np.random.default_rng(seed)
    pool = (spec.num_heads, spec.num_blocks, spec.block_size, spec.head_dim)
    slots = draws.permutation(spec.num_blocks * spec.block_size)[: spec.num_tokens].astype(np.int32)
    slots[-1] = spec.num_blocks * spec.block_size if spec.num_tokens > 1 else slots[-1]
    new = draws.standard_normal((spec.num_tokens, spec.num_heads, spec.head_dim)).astype(np.float32)
    new[1:2] = 0
    arrays = {"new": new, "slot_mapping": slots}
    if spec.cache_dtype == "int8":
        blocks = draws.integers(-127, 128, pool).astype(np.int8)
        return arrays | {"blocks": blocks, "scales": draws.uniform(0.001, 0.1, pool[:3]).astype(np.float32)}
    return arrays | {"blocks": draws.standard_normal(pool).astype(jnp.dtype(spec.cache_dtype))}
