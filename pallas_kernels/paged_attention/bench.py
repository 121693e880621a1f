"""`python -m pallas_kernels.paged_attention.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.common.bench import run_bench
from pallas_kernels.paged_attention.api import OPERATION
from pallas_kernels.paged_attention.specs import Spec, make_arguments

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
SPECS = (
    Spec(name="decode_8_rows_256", rows=((1, 256),) * 8, **SMOLLM2),
    Spec(name="decode_32_rows_256", rows=((1, 256),) * 32, **SMOLLM2),
    Spec(name="decode_32_rows_1024", rows=((1, 1024),) * 32, **SMOLLM2),
    Spec(name="prefill_256", rows=((256, 256),), **SMOLLM2),
)


def arguments(spec: Spec) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), {"scale": spec.head_dim**-0.5, "window": spec.window}


if __name__ == "__main__":
    run_bench(OPERATION, SPECS, arguments)
