"""int8 products at the shapes of models that are served."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.served import Case, products, random_numbers


def cases(is_tiny: bool) -> list[Case]:
    """As many rows as decode and prefill steps have."""
    found = products(is_tiny, (16, 256, 1, 4096))
    made = [_int8(f"w8a8_{name}_{rows}", rows, *shape, num_terms=1) for name, rows, *shape in found]
    return made + [_int8(f"w8a8_{name}_{rows}_2_terms", rows, *shape, num_terms=2) for name, rows, *shape in found if rows in (16, 256)]


def _int8(name: str, num_rows: int, num_outputs: int, num_inputs: int, *, num_terms: int) -> Case:
    def make(key: jax.Array) -> dict[str, Any]:
        x_key, weight_key, scale_key = jax.random.split(key, 3)
        return {
            "x": jax.random.normal(x_key, (num_rows, num_inputs), jnp.bfloat16),
            "weight": random_numbers(weight_key, (num_outputs, num_inputs), "int8"),
            "weight_scale": jax.random.uniform(scale_key, (num_outputs,), jnp.float32, 1e-4, 1e-3),
        }

    return Case(
        operation="int8_matmul",
        name=name,
        make=make,
        static={"num_terms": num_terms, "out_dtype": jnp.bfloat16},
        floor_bytes=num_outputs * (num_inputs + 4) + 2 * num_rows * num_inputs + 2 * num_rows * num_outputs,
        floor_flops=2 * num_rows * num_outputs * num_inputs * num_terms,
        peak="int8",
        sizes={"num_rows": num_rows, "num_outputs": num_outputs, "num_inputs": num_inputs},
        is_compared=num_terms == 1,
    )
