"""Part `numerics_<operation>`: every Mosaic GPU implementation against the reference, on this device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import rotated_numerics
from benchmarks.gpu.rows import Rows
from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import Operation, UnsupportedByKernel

THREADS = 8
TINY_SPECS = 2
BFLOAT16_ROW_ERROR = 1e-2
"""Of results in bfloat16, unless the spec states its own."""
FLOAT32_ROW_ERROR = 1e-4
"""Of results in float32: the matrix units of a GPU drop more bits of a sum than a CPU does. A wrong tile or scale is off by percents."""


def measure(rows: Rows, *, operation: str, is_tiny: bool) -> None:
    """Every spec; the smallest ones that the kernel takes if it has to be interpreted."""
    specs = importlib.import_module(f"pallas_kernels.{operation}.specs")
    api = importlib.import_module(f"pallas_kernels.{operation}.api")
    kernels = [name for name in api.OPERATION.implementations if name in api.OPERATION.if_named]
    if not kernels:
        rows.add(operation=operation, reason="not here: the operation has no kernel for GPUs")
    found = all_specs(specs)
    if is_tiny:
        found = sorted(found, key=lambda spec: size_of(operation, spec))
    for name in kernels:
        compare_all(rows, operation, name, found, partial(compare, operation, name), is_tiny=is_tiny)
    if operation == "write_kv":
        rotated = rotated_numerics.found()
        compare_all(rows, "rotate_and_write_kv", "mosaic", rotated, partial(rotated_numerics.compare, "mosaic"), is_tiny=is_tiny)


def compare_all(
    rows: Rows, operation: str, name: str, found: list[Any], run: Callable[[Any], tuple[float, float]], *, is_tiny: bool
) -> None:
    """All specs at once; or, where the interpreter takes its time, the first that the kernel takes."""
    num_compared = 0
    if is_tiny:
        for spec in found:
            if num_compared < TINY_SPECS and rows.seconds_left > 0:
                num_compared += add(rows, operation, name, spec, partial(run, spec))
        return
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        pending = {pool.submit(run, spec): spec for spec in found}
        for future in as_completed(pending):
            add(rows, operation, name, pending[future], future.result)


def add(rows: Rows, operation: str, name: str, spec: Any, run: Callable[[], tuple[float, float]]) -> bool:
    """A row; whether anything was compared."""
    with rows.row(operation=operation, implementation=name, spec=spec.name) as row:
        try:
            row["row_error"], row["limit"] = run()
        except UnsupportedByKernel as refusal:
            row["refused"] = refusal.reason
        else:
            row["ok"] = bool(row["row_error"] <= row["limit"])
    return "ok" in row


def all_specs(specs: ModuleType) -> list[Any]:
    """Every spec of every tuple of specs in the module, once."""
    tuples = [value for value in vars(specs).values() if isinstance(value, tuple) and value and isinstance(value[0], specs.Spec)]
    return list({spec.name: spec for group in tuples for spec in group}.values())


def size_of(operation: str, spec: Any) -> int:
    """Bytes of the arguments."""
    arrays, _ = arguments(operation, spec)
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(arrays))


def arguments(operation: str, spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and static keywords of one spec."""
    return importlib.import_module(f"pallas_kernels.{operation}.bench").arguments(spec)


def compare(operation: str, implementation: str, spec: Any) -> tuple[float, float]:
    """The largest relative error of a row, and its limit."""
    arrays, static = arguments(operation, spec)
    on_device = jax.tree.map(jnp.asarray, arrays)
    api = importlib.import_module(f"pallas_kernels.{operation}.api")
    specs = importlib.import_module(f"pallas_kernels.{operation}.specs")
    results = []
    with jax.default_matmul_precision("highest"):  # the reference is float32, and GPUs round its factors unless told not to
        for name in (implementation, reference_of(api.OPERATION)):
            call = jax.jit(lambda kwargs, name=name: getattr(api, operation)(**kwargs, **static, implementation=name))
            results.append(jax.device_get(call(on_device)))
    pairs = zip(*map(jax.tree.leaves, results), strict=True)
    errors = [error_of(rows_of(operation, spec, actual), rows_of(operation, spec, expected)) for actual, expected in pairs]
    return max(errors), limit_of(specs, spec, jax.tree.leaves(results[0]))


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    """`row_error` where what is left as it was may be NaN on both sides."""
    untouched = np.isnan(actual) & np.isnan(expected)
    return row_error(np.where(untouched, 0, actual), np.where(untouched, 0, expected))


def reference_of(operation: Operation) -> str:
    """The formula; for an operation that has none but XLA's, that."""
    return "reference" if "reference" in operation.implementations else "xla"


def limit_of(specs: ModuleType, spec: Any, results: list[np.ndarray]) -> float:
    """What the operation's tests allow, but for what the rounding of results, or of sums in the matrix units, costs."""
    if hasattr(spec, "limit"):
        return spec.limit
    if not specs.MAX_ROW_ERROR:
        return 0.0
    is_float32 = all(result.dtype == np.float32 for result in results)
    return max(specs.MAX_ROW_ERROR, FLOAT32_ROW_ERROR if is_float32 else BFLOAT16_ROW_ERROR)


def rows_of(operation: str, spec: Any, result: Any) -> np.ndarray:
    """What means something: no padding tokens of attention, no trash block of a pool; rows of one axis."""
    result = np.asarray(result, np.float32)
    if operation == "paged_attention":
        result = result[: sum(queries for queries, _ in spec.rows)]
    if operation == "write_kv":
        result = result[:, 1:]
    return result.reshape(-1, result.shape[-1]) if result.ndim > 1 else result[None]
