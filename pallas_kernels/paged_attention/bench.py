"""`python -m pallas_kernels.paged_attention.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

from pallas_kernels.common.bench import run_bench
from pallas_kernels.paged_attention.api import OPERATION
from pallas_kernels.paged_attention.specs import LATENT, Spec, make_arguments, static_arguments

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
GEMMA3_270M = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256}
DEEPSEEK_V2_LITE = {"num_heads": 16, "head_dim": 576, "value_dim": 512, **LATENT}
SPECS = (
    Spec(name="decode_8_rows_256", rows=((1, 256),) * 8, **SMOLLM2),
    Spec(name="decode_32_rows_256", rows=((1, 256),) * 32, **SMOLLM2),
    Spec(name="decode_32_rows_1024", rows=((1, 1024),) * 32, **SMOLLM2),
    Spec(name="prefill_256", rows=((256, 256),), **SMOLLM2),
    Spec(name="decode_32_rows_1024_bfloat16", rows=((1, 1024),) * 32, cache_dtype="bfloat16", **SMOLLM2),
    Spec(name="decode_32_rows_1024_int8", rows=((1, 1024),) * 32, cache_dtype="int8", **SMOLLM2),
    Spec(name="decode_1_row_8192_gemma3", rows=((1, 8192),), **GEMMA3_270M),
    Spec(name="decode_1_row_2048_latent", rows=((1, 2048),), **DEEPSEEK_V2_LITE),
    Spec(name="prefill_64_latent", rows=((64, 64),), **DEEPSEEK_V2_LITE),
)


def arguments(spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), static_arguments(spec)


if __name__ == "__main__":
    run_bench(OPERATION, SPECS, arguments)
