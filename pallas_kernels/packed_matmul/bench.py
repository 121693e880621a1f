"""`python -m pallas_kernels.packed_matmul.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

from pallas_kernels.common.bench import run_bench
from pallas_kernels.packed_matmul.api import OPERATION
from pallas_kernels.packed_matmul.specs import Spec, make_arguments

KINDS: dict[str, dict[str, Any]] = {
    "4_bits": {"has_offsets": True},
    "8_bits": {"bits": 8, "group_size": 0, "codes": "int8", "scales": "float32"},
}
SPECS = tuple(
    Spec(name=f"{name}_{num_rows}_rows_{kind}", num_rows=num_rows, num_outputs=outputs, num_inputs=inputs, **options)
    for name, outputs, inputs in (("gate_up", 3072, 576), ("down", 576, 1536))
    for num_rows in (1, 8, 32, 256)
    for kind, options in KINDS.items()
)


def arguments(spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), {}


if __name__ == "__main__":
    run_bench(OPERATION, SPECS, arguments)
