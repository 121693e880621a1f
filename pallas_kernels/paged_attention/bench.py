"""`python -m pallas_kernels.paged_attention.bench`: a table, then one JSON line."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.common.bench import run_bench
from pallas_kernels.paged_attention.api import OPERATION
from pallas_kernels.paged_attention.specs import LATENT, Spec, make_arguments, static_arguments

SMOLLM2: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
GEMMA3_270M: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256}
DEEPSEEK_V2_LITE: dict[str, Any] = {"num_heads": 16, "head_dim": 576, "value_dim": 512, **LATENT}
SMALL = (
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
"""What a CPU is measured with."""

BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "llama3_8b": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **BFLOAT16},
    "llama3_8b_int8": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "cache_dtype": "int8"},
    "llama3_8b_float8": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "cache_dtype": "float8_e4m3fn"},
    "qwen3_30b": {"num_heads": 32, "num_kv_heads": 4, "head_dim": 128, **BFLOAT16},
    "deepseek_v2_lite": {**DEEPSEEK_V2_LITE, **BFLOAT16},
}
MOST_KEYS = 65_536
"""Of all rows together: arguments are drawn on the host."""
LARGE = tuple(
    Spec(name=f"{model}_{num_rows}_rows_{keys}", rows=((1, keys),) * num_rows, **sizes)
    for model, sizes in MODELS.items()
    for num_rows in (1, 32, 256)
    for keys in (256, 512, 2048, 8192, 32_768)
    if num_rows * keys <= MOST_KEYS
)
"""Decoding at the shapes of models that are served, what a GPU is measured with."""


def arguments(spec: Spec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return make_arguments(spec), static_arguments(spec)


if __name__ == "__main__":
    run_bench(OPERATION, SMALL if jax.default_backend() == "cpu" else LARGE, arguments)
