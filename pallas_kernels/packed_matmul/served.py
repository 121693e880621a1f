"""Packed products at the shapes of models that are served."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.served import Case, products, random_numbers
from pallas_kernels.packed_matmul.matrix import RUN, PackedMatrix


def cases(is_tiny: bool) -> list[Case]:
    """As many rows as decode and prefill steps have."""
    found = products(is_tiny, (1, 16, 256, 64, 4096))
    return [_packed(f"{kind}_{name}_{rows}", kind, rows, *shape) for name, rows, *shape in found for kind in ("w8a16", "w4a16")]


def _packed(name: str, kind: str, num_rows: int, num_outputs: int, num_inputs: int) -> Case:
    """`w8a16` as quant.int8_weight_only stores it, `w4a16` as quant.int4 does: symmetric groups of 32 with a float16 scale."""

    def make(key: jax.Array) -> dict[str, Any]:
        x_key, code_key, scale_key = jax.random.split(key, 3)
        x = jax.random.normal(x_key, (num_rows, num_inputs), jnp.bfloat16)
        if kind == "w8a16":
            scales = jax.random.uniform(scale_key, (num_outputs, 1), jnp.float32, 1e-4, 1e-3)
            return {
                "x": x,
                "matrix": PackedMatrix(codes=random_numbers(code_key, (num_outputs, num_inputs), "int8"), scales=scales, bits=8),
            }
        codes = jax.random.bits(code_key, (num_outputs, num_inputs // RUN, RUN // 2), jnp.uint8)
        scales = jax.random.uniform(scale_key, (num_outputs, num_inputs // RUN), jnp.float32, 1e-3, 1e-2).astype(jnp.float16)
        return {"x": x, "matrix": PackedMatrix(codes=codes, scales=scales, group_size=RUN, zero=8)}

    weight_bytes = num_outputs * num_inputs + 4 * num_outputs if kind == "w8a16" else num_outputs * num_inputs * 9 // 16
    return Case(
        operation="packed_matmul",
        name=name,
        make=make,
        static={},
        floor_bytes=weight_bytes + 2 * num_rows * num_inputs + 4 * num_rows * num_outputs,
        floor_flops=2 * num_rows * num_outputs * num_inputs,
        sizes={"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs},
        is_compared=num_rows in (1, 16, 256),
    )
