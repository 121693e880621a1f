"""What the int8 product's kernels may compile to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import interpreter
from pallas_kernels.common.budget import MAX_SHARED_BYTES, CopiedBytes, KernelCheck
from pallas_kernels.int8_matmul import mosaic
from pallas_kernels.int8_matmul.specs import Spec, make_arguments, static_arguments

COPIES = r"cp\.async\.bulk\.tensor.*load"


def _run(spec: Spec) -> Callable[..., Any]:
    def run(x: Any, weight: Any, weight_scale: Any, bias: Any = None) -> Any:
        return mosaic.int8_matmul(x, weight, weight_scale, bias=bias, **static_arguments(spec))

    return run


def _arguments(spec: Spec) -> tuple[Any, ...]:
    dtype, outputs = jnp.dtype(spec.dtype), (spec.num_outputs,)
    x = jax.ShapeDtypeStruct((spec.num_rows, spec.num_inputs), dtype)
    weight = jax.ShapeDtypeStruct((spec.num_outputs, spec.num_inputs), jnp.int8)
    vectors = [jax.ShapeDtypeStruct(outputs, jnp.float32), *([jax.ShapeDtypeStruct(outputs, dtype)] if spec.has_bias else [])]
    return x, weight, *vectors


def _floor(spec: Spec) -> int:
    """The weight with its scales, x, the bias and the result."""
    itemsize = jnp.dtype(spec.dtype).itemsize
    numbers = spec.num_rows * (spec.num_inputs + spec.num_outputs) + spec.num_outputs * spec.has_bias
    return spec.num_outputs * (spec.num_inputs + 4) + numbers * itemsize


def _count() -> int:
    with interpreter.interpreted(detect_races=False) as counted:
        call = jax.jit(lambda kwargs: mosaic.int8_matmul(**kwargs, **static_arguments(SMALL), interpret=True))
        jax.block_until_ready(call(make_arguments(SMALL)))
    return counted.bytes_read + counted.bytes_written


SMALL = Spec(name="small", num_rows=1, num_outputs=256, num_inputs=512, dtype="bfloat16")


def _check(instruction: str, max_registers: int, max_shared_bytes: int, copied: CopiedBytes | None = None, **sizes: Any) -> KernelCheck:
    served: dict[str, Any] = {"num_inputs": 4096, "dtype": "bfloat16"}
    spec = Spec(**served | sizes)
    return KernelCheck(
        name=spec.name,
        run=_run(spec),
        arguments=_arguments(spec),
        max_registers=max_registers,
        max_shared_bytes=max_shared_bytes,
        required=(rf"wgmma\.m64n{instruction}k32\.s32\.s8\.s8", COPIES),
        floor_bytes=_floor(spec),
        floor_flops=2 * spec.num_terms * spec.num_rows * spec.num_outputs * spec.num_inputs,
        peak="int8",
        copied=copied,
    )


KERNELS = (
    _check("8", 64, 202_000, CopiedBytes(count=_count, floor_bytes=_floor(SMALL)), name="one_row", num_rows=1, num_outputs=28672),
    _check("32", 96, 202_000, name="16_rows_2_terms", num_rows=16, num_outputs=6144, num_terms=2),
    _check("32", 96, 202_000, name="16_rows_2_terms_down", num_rows=16, num_outputs=4096, num_inputs=14336, num_terms=2),
    _check("(128|256)", 168, MAX_SHARED_BYTES, name="256_rows", num_rows=256, num_outputs=4096),
    _check("256", 168, MAX_SHARED_BYTES, name="4096_rows", num_rows=4096, num_outputs=28672),
    _check(
        "256",
        168,
        MAX_SHARED_BYTES,
        name="bias_gelu_2_terms",
        num_rows=4096,
        num_outputs=4096,
        num_terms=2,
        has_bias=True,
        activation="gelu",
    ),
)
