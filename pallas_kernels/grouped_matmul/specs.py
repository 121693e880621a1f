"""Named argument sets of the grouped product."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

MAX_ROW_ERROR = 1e-5
"""Sums of a thousand float32 products; a wrong expert is off by more than one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """How many tiles each expert has, then empty ones; U rows a tile, N outputs, K inputs."""

    name: str
    tiles: tuple[int, ...]
    num_empty: int = 0
    tile_rows: int = 8
    num_outputs: int = 48
    num_inputs: int = 32
    dtype: str = "float32"


SPECS = (
    Spec(name="each_expert_once", tiles=(1, 1, 1, 1)),
    Spec(name="experts_without_tokens", tiles=(0, 2, 0, 0, 1, 3, 0), num_empty=2),
    Spec(name="one_expert_has_all", tiles=(0, 0, 6, 0), num_empty=3),
    Spec(name="last_expert_has_all", tiles=(0, 0, 0, 5)),
    Spec(name="nothing_at_all", tiles=(0, 0, 0), num_empty=4),
    Spec(name="odd_sizes", tiles=(2, 0, 1), num_empty=1, tile_rows=3, num_outputs=37, num_inputs=51),
    Spec(name="one_row_tiles", tiles=(1, 0, 2), tile_rows=1, num_outputs=7, num_inputs=5),
    Spec(name="bfloat16", tiles=(1, 0, 2), num_empty=1, tile_rows=16, num_outputs=104, num_inputs=208, dtype="bfloat16"),
    Spec(name="bfloat16_halves", tiles=(1, 2), num_empty=1, num_outputs=64, num_inputs=96, dtype="bfloat16"),
    Spec(name="bfloat16_eight_rows", tiles=(0, 2, 1), num_empty=1, num_outputs=192, num_inputs=128, dtype="bfloat16"),
    Spec(name="wide", tiles=(1, 3, 0, 2), num_empty=1, tile_rows=16, num_outputs=256, num_inputs=1024),
)


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal rows and weights; empty tiles hold numbers too, and the weights differ in size between experts."""
    draws = np.random.default_rng(seed)
    num_experts, num_tiles = len(spec.tiles), sum(spec.tiles) + spec.num_empty
    x = draws.standard_normal((num_tiles, spec.tile_rows, spec.num_inputs)).astype(np.float32)
    weight = draws.standard_normal((num_experts, spec.num_outputs, spec.num_inputs)).astype(np.float32)
    weight *= np.arange(1, num_experts + 1, dtype=np.float32)[:, None, None]
    tile_expert = np.repeat(np.arange(num_experts + 1), (*spec.tiles, spec.num_empty)).astype(np.int32)
    return {"x": x.astype(jnp.dtype(spec.dtype)), "weight": weight.astype(jnp.dtype(spec.dtype)), "tile_expert": tile_expert}
