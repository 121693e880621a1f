"""Part `machine`: what this is. Part `copy`: how fast its memory is, the yardstick of all other numbers."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.rows import Rows
from pallas_kernels.common import discovery, served
from pallas_kernels.common.timing import Chain

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy", "transformers", "tokenizers", "tokamax", "torch"),
    *("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc", "matplotlib"),
)
SMI_FIELDS = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,pstate"
COPY_BYTES = 4 * 2**30
PEAK = {"bfloat16": 989e12, "int8": 1979e12}
"""Operations per second of an H100's and an H200's matrix units without sparsity, by NVIDIA's datasheet."""


def measure_machine(rows: Rows, *, is_tiny: bool) -> None:
    """Device, versions, clocks, and which implementation each operation takes here."""
    device = jax.devices()[0]
    with rows.row(what="device") as row:
        stats = device.memory_stats() or {}
        row |= {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()}
        row |= {"memory_bytes": stats.get("bytes_limit"), "cores": getattr(device, "core_count", None)}
    with rows.row(what="versions") as row:
        row |= {package: _version(package) for package in PACKAGES}
    with rows.row(what="nvidia-smi") as row:
        row |= _smi()
    for operation in discovery.operations():
        with rows.row(what="choice", operation=operation.name) as row:
            case = served.cases(operation.name, is_tiny=is_tiny)[0]
            row["case"] = case.name
            row["implementation"], row["refused"] = operation.choice(jax.eval_shape(case.make, jax.random.key(0)), case.static)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not here"


def _smi() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {"reason": "not here: no nvidia-smi"}
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    values = answer.stdout.strip().splitlines()[0].split(", ") if answer.returncode == 0 else []
    return dict(zip(SMI_FIELDS.split(","), values, strict=True)) if values else {"reason": f"not here: {answer.stderr.strip()[:200]}"}


def measure_copy(rows: Rows, *, is_tiny: bool) -> None:
    """Bytes read plus bytes written per second of an array's copy, and of a sum, which only reads."""
    num_bytes = 2**24 if is_tiny else COPY_BYTES
    array = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    for name, call, moved in (
        ("copy", lambda x: x ^ jnp.uint32(1), 2 * num_bytes),  # a bare copy would be left out
        ("read", lambda x: jnp.sum(x, dtype=jnp.uint32), num_bytes),
    ):
        with rows.row(what=name, bytes=moved) as row:
            chain = Chain.compile(call, 1, array, num_calls=4 if is_tiny else 16)
            seconds, kernel_seconds = chain.seconds([array]), chain.kernel_seconds([array])
            row |= {"seconds": seconds, "kernel_seconds": kernel_seconds, "bytes_per_second": moved / (kernel_seconds or seconds)}
    with rows.row(what="product", dtype="bfloat16") as row:
        size = 256 if is_tiny else 8192
        left, right = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (1, 2))
        chain = Chain.compile(lambda pair: jnp.dot(*pair), 1, (left, right), num_calls=8)
        seconds = chain.kernel_seconds([(left, right)]) or chain.seconds([(left, right)])
        row |= {"size": size, "seconds": seconds, "flops_per_second": 2 * size**3 / seconds}


def yardsticks(copy_rows: list[dict[str, Any]]) -> dict[str, float]:
    """Measured copy bandwidth and the datasheet's peaks; without a measurement there is no bandwidth."""
    copied = [row["bytes_per_second"] for row in copy_rows if row.get("what") == "copy" and "failed" not in row]
    return ({"bytes_per_second": copied[0]} if copied else {}) | PEAK
