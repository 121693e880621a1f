"""One part in this process: `python -m benchmarks.gpu.part NAME --folder DIR --seconds N [--tiny]`; `run.py` starts it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax

from benchmarks.gpu.machine import measure_copy, measure_machine, yardsticks
from benchmarks.gpu.rows import Rows

STORAGES = ("bfloat16", "int8_weight_only", "int4", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True, help="where <name>.json is written, and copy.json is read")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="compiled programs")
    parser.add_argument("--dump", type=Path, help="where XLA_FLAGS lets XLA dump")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # the interpreter's warpgroups wait for each other, each on a thread
    jax.config.update("jax_compilation_cache_dir", str(args.cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    run(args.name, Rows(args.folder / f"{args.name}.json", args.seconds), is_tiny=args.tiny, folder=args.folder, dump=args.dump)


def run(name: str, rows: Rows, *, is_tiny: bool, folder: Path, dump: Path | None) -> None:
    """What a part imports it imports here, so that what breaks one leaves the others whole."""
    copied = folder / "copy.json"
    rates = yardsticks(json.loads(copied.read_text()) if copied.exists() else [])
    kind, _, operation = name.partition("_")
    if name == "machine":
        measure_machine(rows, is_tiny=is_tiny)
    elif name == "copy":
        measure_copy(rows, is_tiny=is_tiny)
    elif name == "torch":
        from benchmarks.gpu import torch_peers

        torch_peers.measure(rows, is_tiny=is_tiny)
    elif name in STORAGES:
        from benchmarks.gpu import end_to_end

        end_to_end.measure(rows, storage=name, is_tiny=is_tiny, bytes_per_second=rates.get("bytes_per_second"), dump=dump)
    elif kind == "numerics":
        from benchmarks.gpu import numerics

        numerics.measure(rows, operation=operation, is_tiny=is_tiny)
    elif kind == "kernels":
        from benchmarks.gpu import kernels

        kernels.measure(rows, operation=operation, is_tiny=is_tiny, rates=rates)
    else:
        raise SystemExit(f"no such part: {name}")


if __name__ == "__main__":
    main()
