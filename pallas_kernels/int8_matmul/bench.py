"""`python -m pallas_kernels.int8_matmul.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.common.bench import run_bench
from pallas_kernels.int8_matmul.api import OPERATION
from pallas_kernels.int8_matmul.specs import Spec, make_arguments

SPECS = tuple(
    Spec(name=f"{name}_{num_rows}_rows_{num_terms}_terms", num_rows=num_rows, num_outputs=outputs, num_inputs=inputs, num_terms=num_terms)
    for name, outputs, inputs in (("gate_up", 3072, 576), ("down", 576, 1536))
    for num_rows in (8, 32, 256)
    for num_terms in (1, 2)
)


def arguments(spec: Spec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), {"num_terms": spec.num_terms}


if __name__ == "__main__":
    run_bench(OPERATION, SPECS, arguments)
