"""Named argument sets of write_kv."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_ROW_ERROR = 0.0
"""A copy is exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """T tokens into a pool of N blocks."""

    name: str
    num_tokens: int
    num_blocks: int = 8
    num_heads: int = 2
    block_size: int = 4
    head_dim: int = 8


SPECS = (Spec(name="one_token", num_tokens=1), Spec(name="half_the_pool", num_tokens=16), Spec(name="one_head", num_tokens=5, num_heads=1))


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """A full pool, new vectors, distinct slots, and one slot past the end, which must be dropped."""
    draws = np.random.default_rng(seed)
    pool = (spec.num_heads, spec.num_blocks, spec.block_size, spec.head_dim)
    slots = draws.permutation(spec.num_blocks * spec.block_size)[: spec.num_tokens].astype(np.int32)
    slots[-1] = spec.num_blocks * spec.block_size if spec.num_tokens > 1 else slots[-1]
    return {
        "blocks": draws.standard_normal(pool).astype(np.float32),
        "new": draws.standard_normal((spec.num_tokens, spec.num_heads, spec.head_dim)).astype(np.float32),
        "slot_mapping": slots,
    }
