"""`python -m pallas_kernels.int8_matmul.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels.common.bench import run_bench
from pallas_kernels.int8_matmul.api import OPERATION
from pallas_kernels.int8_matmul.specs import Spec, make_arguments, static_arguments

SMALL = tuple(
    Spec(name=f"{name}_{num_rows}_rows_{num_terms}_terms", num_rows=num_rows, num_outputs=outputs, num_inputs=inputs, num_terms=num_terms)
    for name, outputs, inputs in (("gate_up", 3072, 576), ("down", 576, 1536))
    for num_rows in (8, 32, 256)
    for num_terms in (1, 2)
)
"""SmolLM2-135M, what a CPU is measured with."""

LARGE = tuple(
    Spec(
        name=f"{name}_{num_rows}_rows_{num_terms}_terms",
        num_rows=num_rows,
        num_outputs=outputs,
        num_inputs=inputs,
        num_terms=num_terms,
        dtype="bfloat16",
    )
    for name, outputs, inputs in (("qkv", 6144, 4096), ("out", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336))
    for num_rows in (1, 16, 256, 4096)
    for num_terms in (1, 2)
)
"""Llama-3-8B, what a GPU is."""


def arguments(spec: Spec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), static_arguments(spec)


if __name__ == "__main__":
    run_bench(OPERATION, SMALL if jax.default_backend() == "cpu" else LARGE, arguments)
