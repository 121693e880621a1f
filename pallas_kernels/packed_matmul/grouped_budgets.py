"""What the product of tiles of rows, each with its expert's packed matrix, may compile to, for the experts of Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.budget import MAX_REGISTERS, MAX_SHARED_BYTES, KernelCheck
from pallas_kernels.packed_matmul.mosaic.grouped import grouped_packed_matmul
from pallas_kernels.packed_matmul.specs import Spec, make_matrix

NUM_EXPERTS, PER_TOKEN = 128, 8
COPIES = r"cp\.async\.bulk\.tensor.*load"


def _check(name: str, num_tokens: int, tile_rows: int, columns: int, max_registers: int, **stored: Any) -> KernelCheck:
    """Gate and up, 2048 inputs to 1536 outputs; `columns` rows of a tile in one thread block."""
    num_outputs, num_inputs = 1536, 2048
    one = make_matrix(Spec(name=name, num_rows=1, num_outputs=1, num_inputs=num_inputs, **stored), np.random.default_rng(0))
    matrices = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((NUM_EXPERTS, num_outputs, *leaf.shape[1:]), leaf.dtype), one)
    num_pairs = num_tokens * PER_TOKEN
    num_used = min(NUM_EXPERTS, num_pairs)
    num_tiles = num_used + (num_pairs - num_used) // tile_rows
    weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(matrices)) * num_used // NUM_EXPERTS
    return KernelCheck(
        name=name,
        devices=("h200",),
        run=grouped_packed_matmul,
        arguments=(
            jax.ShapeDtypeStruct((num_tiles, tile_rows, num_inputs), jnp.bfloat16),
            matrices,
            jax.ShapeDtypeStruct((num_tiles,), jnp.int32),
        ),
        max_registers=max_registers,
        max_shared_bytes=MAX_SHARED_BYTES,
        required=(rf"wgmma\.m64n{columns}k16\.f32\.bf16\.bf16", COPIES),
        floor_bytes=weight_bytes + num_tiles * tile_rows * (2 * num_inputs + 4 * num_outputs),
        floor_flops=2 * num_pairs * num_outputs * num_inputs,
    )


KERNELS = (
    _check("grouped_w8_32_tokens", 32, 8, 8, 96, bits=8, group_size=0, codes="int8", scales="float32"),
    _check("grouped_w4_offsets_32_tokens", 32, 8, 8, 168, has_offsets=True),
    _check("grouped_w4_offsets_4096_tokens", 4096, 128, 32, MAX_REGISTERS, has_offsets=True),
)
