"""What every way of storing weights and KV costs in quality, memory and loading time: a table, then one JSON line.

`python benchmarks/quality.py smollm2-135m [--num-tokens 8192] [--only NAME …]`

Text: the Brown corpus. Each row is compared, position by position, with the same checkpoint in float32 (for a GGUF: its
dequantized weights).
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer import LLM
from jaxinfer.benchmarking.environment import describe_environment
from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.convert import ConvertOptions, convert
from jaxinfer.config import EngineConfig
from jaxinfer.evaluation.corpus import brown_text
from jaxinfer.evaluation.scores import log_probs, measure_agreement, windows_of
from jaxinfer.startup import resolve_storage

WINDOW = 512
REFERENCE = "float32"
AS_STORED = {"quantization": "auto", "quantization_group_size": 32, "quantization_zero_point": "auto"}
INT4 = {"quantization": "int4"}
CALIBRATED = "is_calibrated"
"""Not an engine's option: the conversion is calibrated on the other end of the corpus, as `jaxinfer convert --calibrate` does."""
CALIBRATION_TOKENS = 8192
ROWS: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {"quantization": "none"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "as stored": {"quantization": "auto"},
    "int8": {"quantization": "int8"},
    "int8_weight_only": {"quantization": "int8_weight_only"},
    "int4, 32, symmetric": {**INT4, "quantization_zero_point": "off"},
    "int4, 32, zero point": {**INT4, "quantization_zero_point": "on"},
    "int4, 32, zero point, calibrated": {**INT4, "quantization_zero_point": "on", CALIBRATED: True},
    "int4, 32, symmetric, calibrated": {**INT4, "quantization_zero_point": "off", CALIBRATED: True},
    "int4, 32, zero point, int4 vocabulary": {**INT4, "quantization_zero_point": "on", "quantize_embeddings": "on"},
    "int4, 64, zero point": {**INT4, "quantization_zero_point": "on", "quantization_group_size": 64},
    "int4, 128, zero point": {**INT4, "quantization_zero_point": "on", "quantization_group_size": 128},
    "KV bfloat16": {"quantization": "none", "kv_cache_dtype": "bfloat16"},
    "KV int8": {"quantization": "none", "kv_cache_dtype": "int8"},
}


def load(model: str, options: Mapping[str, Any]) -> LLM:
    return LLM(
        model=model,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=WINDOW + 1,
        num_kv_blocks=64,
        show_progress=False,
        **{"dtype": "float32", **{name: value for name, value in options.items() if name != CALIBRATED}},
    )


def written(model: str, options: Mapping[str, Any], folder: Path) -> Path:
    """The checkpoint as it is, for "auto"; else its conversion, quantized once and for all."""
    path = open_checkpoint(model).path
    if options["quantization"] == "auto":
        return path
    names = {field.name for field in fields(EngineConfig)} - {"dtype"}
    storage = resolve_storage(EngineConfig(**{name: value for name, value in options.items() if name in names}))
    calibration = calibration_windows if CALIBRATED in options else None
    dtype = options.get("dtype", "float32")
    return convert(model, folder / "converted", ConvertOptions(format="orbax", dtype=dtype, storage=storage, calibration=calibration))


def calibration_windows(tokenizer: Any) -> list[list[int]]:
    return windows_of(brown_text(is_backwards=True), tokenizer, num_tokens=CALIBRATION_TOKENS, window=WINDOW)


def size_on_disk(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--only", nargs="*", choices=list(ROWS), help="some rows; the reference is always computed")
    args = parser.parse_args()
    reference = load(args.model, ROWS[REFERENCE])
    windows = windows_of(brown_text(), reference.tokenizer, num_tokens=args.num_tokens, window=WINDOW)
    expected: list[np.ndarray] = [log_probs(reference.engine, window) for window in windows]
    rows = {}
    for name, options in ROWS.items():
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            is_weights = "kv_cache_dtype" not in options
            path = written(args.model, options, Path(folder)) if is_weights else None
            llm = load(str(path), {**options, **AS_STORED}) if path is not None else load(args.model, options)
            started = time.perf_counter()
            result = measure_agreement(llm.engine, windows, expected.__getitem__)
            rows[name] = {
                "perplexity": result.perplexity.perplexity,
                "perplexity_ratio": result.perplexity.perplexity / result.reference.perplexity,
                "kl_mean": result.kl_mean,
                "kl_p99": result.kl_p99,
                "top1": result.top1,
                "bytes_in_memory": llm.engine.runner.weight_bytes,
                "bytes_on_disk": size_on_disk(path) if path is not None else None,
                "load_seconds": llm.startup.load_seconds,
                "evaluation_seconds": time.perf_counter() - started,
            }
        row = rows[name]
        print(
            f"{name:40s} ppl {row['perplexity']:8.3f} ({100 * row['perplexity_ratio'] - 100:+6.2f} %)  KL {row['kl_mean']:.5f}  "
            f"top-1 {row['top1']:.4f}  memory {row['bytes_in_memory'] / 1e6:7.1f} MB  load {row['load_seconds']:5.1f} s",
            flush=True,
        )
        del llm
        gc.collect()
    about = {"benchmark": "quality", **describe_environment(), "model": args.model}
    print(json.dumps(about | {"num_tokens": len(windows) * WINDOW, "window": WINDOW, "rows": rows}))


if __name__ == "__main__":
    main()
