"""`python -m pallas_kernels.packed_matmul.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.common.bench import run_bench
from pallas_kernels.packed_matmul.api import OPERATION
from pallas_kernels.packed_matmul.specs import Spec, make_arguments

KINDS: dict[str, dict[str, Any]] = {
    "4_bits": {"has_offsets": True},
    "8_bits": {"bits": 8, "group_size": 0, "codes": "int8", "scales": "float32"},
}
SMALL = tuple(
    Spec(name=f"{name}_{num_rows}_rows_{kind}", num_rows=num_rows, num_outputs=outputs, num_inputs=inputs, **options)
    for name, outputs, inputs in (("gate_up", 3072, 576), ("down", 576, 1536))
    for num_rows in (1, 8, 32, 256)
    for kind, options in KINDS.items()
)
"""SmolLM2-135M, what a CPU is measured with."""

LARGE_KINDS: dict[str, dict[str, Any]] = {
    "w8": KINDS["8_bits"],
    "w4_groups_of_128": {"group_size": 128, "zero": 8},
    "w4_groups_of_32": {"zero": 8},
}
LARGE = tuple(
    Spec(name=f"{name}_{num_rows}_rows_{kind}", num_rows=num_rows, num_outputs=outputs, num_inputs=inputs, dtype="bfloat16", **options)
    for name, outputs, inputs in (("qkv", 6144, 4096), ("out", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336))
    for num_rows in (1, 16, 256, 4096)
    for kind, options in LARGE_KINDS.items()
)
"""Llama-3-8B, what a GPU is."""


def arguments(spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), {}


if __name__ == "__main__":
    run_bench(OPERATION, SMALL if jax.default_backend() == "cpu" else LARGE, arguments)
