"""The bench of an operation: every implementation over every spec, a table, then one JSON line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.common.dispatch import Operation, UnsupportedByKernel
from pallas_kernels.common.timing import median_seconds


def run_bench(operation: Operation, specs: Sequence[Any], arguments: Callable[[Any], tuple[dict[str, np.ndarray], dict[str, Any]]]) -> None:
    """Print microseconds per call; `arguments(spec)` gives arrays and static keywords."""
    results: dict[str, dict[str, float | str]] = {}
    print(f"{operation.name} on {jax.devices()[0].device_kind}, microseconds per call")
    for spec in specs:
        arrays, static = arguments(spec)
        on_device = {name: jax.device_put(array) for name, array in arrays.items()}
        row: dict[str, float | str] = {}
        for name, implementation in operation.implementations.items():
            jitted = jax.jit(lambda kwargs, run=implementation, static=static: run(**kwargs, **static))
            try:
                row[name] = round(median_seconds(lambda jitted=jitted, kwargs=on_device: jitted(kwargs)) * 1e6, 1)
            except UnsupportedByKernel as refusal:
                row[name] = refusal.reason
        results[spec.name] = row
        print(f"  {spec.name:28s}" + "  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps({"operation": operation.name, "jax": jax.__version__, "device": jax.devices()[0].device_kind, "us": results}))
