"""What the grouped product's kernel may compile to, for the experts of Qwen3-30B-A3B."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.common.budget import KernelCheck
from pallas_kernels.grouped_matmul import mosaic

NUM_EXPERTS, PER_TOKEN = 128, 8
GATE_UP, DOWN = (1536, 2048), (2048, 768)


def _floor(num_used: int, num_tiles: int, tile_rows: int, num_outputs: int, num_inputs: int) -> int:
    """The weights of the experts that are used, the rows and the results."""
    return 2 * num_used * num_outputs * num_inputs + num_tiles * (tile_rows * (2 * num_inputs + 4 * num_outputs) + 4)


def _check(name: str, num_tokens: int, tile_rows: int, shape: tuple[int, int], max_registers: int) -> KernelCheck:
    num_pairs = num_tokens * PER_TOKEN
    num_used = min(NUM_EXPERTS, num_pairs)
    num_tiles = num_used + (num_pairs - num_used) // tile_rows
    num_outputs, num_inputs = shape
    return KernelCheck(
        name=name,
        # An H100 gets the same code: as many multiprocessors, the same architecture.
        devices=("h100", "h200") if num_tokens == 1 else ("h200",),
        run=mosaic.grouped_matmul,
        arguments=(
            jax.ShapeDtypeStruct((num_tiles, tile_rows, num_inputs), jnp.bfloat16),
            jax.ShapeDtypeStruct((NUM_EXPERTS, num_outputs, num_inputs), jnp.bfloat16),
            jax.ShapeDtypeStruct((num_tiles,), jnp.int32),
        ),
        max_registers=max_registers,
        max_shared_bytes=166_000 if tile_rows > 64 else 114_000,
        required=(rf"wgmma\.m64n{tile_rows}k16\.f32\.bf16\.bf16", r"cp\.async\.bulk\.tensor.*load"),
        floor_bytes=_floor(num_used, num_tiles, tile_rows, num_outputs, num_inputs),
        floor_flops=2 * num_pairs * num_outputs * num_inputs,
    )


KERNELS = (
    _check("1_token_gate_up", 1, 8, GATE_UP, 64),
    _check("256_tokens_gate_up", 256, 16, GATE_UP, 64),
    _check("1024_tokens_down", 1024, 64, DOWN, 96),
    _check("4096_tokens_gate_up", 4096, 128, GATE_UP, 128),
)
