"""`python -m pallas_kernels.write_kv.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.common.bench import run_bench
from pallas_kernels.write_kv.api import OPERATION
from pallas_kernels.write_kv.specs import Spec, make_arguments

SPECS = tuple(
    Spec(name=f"{count}_tokens_{dtype}", num_tokens=count, num_blocks=1024, num_heads=3, block_size=16, head_dim=64, cache_dtype=dtype)
    for dtype in ("float32", "int8")
    for count in (8, 32, 256)
)


def arguments(spec: Spec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays of one spec. The pool is not donated here, so this counts a copy of it as well."""
    return make_arguments(spec), {}


if __name__ == "__main__":
    run_bench(OPERATION, SPECS, arguments)
