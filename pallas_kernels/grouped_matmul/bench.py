"""`python -m pallas_kernels.grouped_matmul.bench`: a table, then one JSON line.

Each spec is a batch of T tokens, each with k of X experts drawn at random; `dense` is every token with every expert.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.common.bench import run_bench
from pallas_kernels.common.dispatch import Operation
from pallas_kernels.grouped_matmul.api import OPERATION
from pallas_kernels.grouped_matmul.specs import Spec, make_arguments

TILE_ROWS = 8


def routed(num_experts: int, experts_per_token: int, num_tokens: int, num_outputs: int = 512, num_inputs: int = 256) -> Spec:
    """The tiles of a batch whose tokens choose at random."""
    draws = np.random.default_rng(0)
    chosen = np.concatenate([draws.permutation(num_experts)[:experts_per_token] for _ in range(num_tokens)])
    tiles = -(-np.bincount(chosen, minlength=num_experts) // TILE_ROWS)
    num_pairs = num_tokens * experts_per_token
    occupied = min(num_pairs, num_experts)
    num_tiles = occupied + (num_pairs - occupied) // TILE_ROWS
    return Spec(
        name=f"{experts_per_token}_of_{num_experts}_{num_tokens}_tokens",
        tiles=tuple(tiles.tolist()),
        num_empty=num_tiles - int(tiles.sum()),
        tile_rows=TILE_ROWS,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )


SPECS = tuple(routed(*experts, num_tokens) for experts in ((16, 2), (16, 4), (64, 2), (64, 4)) for num_tokens in (1, 8, 64))


def arguments(spec: Spec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), {}


def compared_arguments(spec: Spec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """With the number of tokens, which is how many rows the dense product takes."""
    return make_arguments(spec), {"num_tokens": int(spec.name.split("_")[-2])}


def dense(
    *, x: Float[Array, "A U K"], weight: Float[Array, "X N K"], tile_expert: Int32[Array, "A"], num_tokens: int
) -> Float32[Array, "T X N"]:
    """As many rows as there are tokens with every expert's weight, in the one dot that is fastest."""
    rows = jnp.resize(x.reshape(-1, x.shape[-1]), (num_tokens, x.shape[-1]))
    product = lax.dot_general(rows, weight.reshape(-1, x.shape[-1]), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product.reshape(num_tokens, weight.shape[0], weight.shape[1])


def without(name: str) -> Any:
    """An implementation that ignores what only `dense` asks for."""
    run = OPERATION.implementations[name]
    return lambda *, num_tokens, **arrays: run(**arrays)


COMPARED = Operation(name=OPERATION.name, implementations={**{name: without(name) for name in OPERATION.implementations}, "dense": dense})

if __name__ == "__main__":
    run_bench(COMPARED, SPECS, compared_arguments)
