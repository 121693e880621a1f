"""`python -m pallas_kernels.write_kv.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.common.bench import run_bench
from pallas_kernels.write_kv.api import OPERATION
from pallas_kernels.write_kv.specs import Spec, make_arguments

SPECS = tuple(
    Spec(
        name=f"{count}_tokens_{dtype}",
        num_tokens=count,
        num_blocks=1024,
        num_heads=8,
        block_size=16,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        cache_dtype=dtype,
    )
    for dtype in ("bfloat16", "int8", "float8_e4m3fn")
    for count in (1, 32, 256, 4096)
)


def arguments(spec: Spec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays of one spec. The pools are not donated here, so this counts copies of them as well."""
    return make_arguments(spec), {}


if __name__ == "__main__":
    run_bench(OPERATION, SPECS, arguments)
