"""What the packed product's kernels may compile to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common import interpreter
from pallas_kernels.common.budget import MAX_SHARED_BYTES, CopiedBytes, KernelCheck
from pallas_kernels.packed_matmul import grouped_budgets, mosaic
from pallas_kernels.packed_matmul.matrix import RUN, PackedMatrix
from pallas_kernels.packed_matmul.specs import FP4_VALUES, Spec, make_arguments

COPIES = r"cp\.async\.bulk\.tensor.*load"
MAX_REGISTERS = 168
"""What three warpgroups may have each; beyond 32 rows of activations the multiplying ones take some of the copying one's."""


def _arguments(spec: Spec) -> tuple[jax.ShapeDtypeStruct, PackedMatrix]:
    size = (spec.num_outputs, spec.num_inputs)
    num_groups = spec.num_inputs // spec.group_size if spec.group_size else 1
    numbers = jax.ShapeDtypeStruct((spec.num_outputs, num_groups), jnp.dtype(spec.scales))
    supers = jax.ShapeDtypeStruct((spec.num_outputs, num_groups // spec.per_super), jnp.float16) if spec.per_super else None
    is_byte = spec.bits == 8
    matrix = PackedMatrix(
        codes=jax.ShapeDtypeStruct(size if is_byte else (size[0], size[1] // RUN, RUN // 2), jnp.dtype(spec.codes)),
        scales=numbers,
        super_scales=supers,
        offsets=numbers if spec.has_offsets else None,
        super_offsets=supers if spec.has_offsets else None,
        zeros=jax.ShapeDtypeStruct(numbers.shape, jnp.uint8) if spec.has_zeros else None,
        bits=spec.bits,
        group_size=spec.group_size,
        zero=spec.zero,
        codebook=spec.codebook,
    )
    return jax.ShapeDtypeStruct((spec.num_rows, spec.num_inputs), jnp.bfloat16), matrix


def _floor(spec: Spec) -> int:
    """Codes and the numbers of groups, x and the float32 result."""
    x, matrix = _arguments(spec)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((x, matrix))) + 4 * spec.num_rows * spec.num_outputs


def _copied(spec: Spec) -> CopiedBytes:
    def count() -> int:
        arguments = jax.tree.map(jnp.asarray, make_arguments(spec))
        with interpreter.interpreted(detect_races=False) as counted:
            call = jax.jit(lambda kwargs: mosaic.packed_matmul(**kwargs, interpret=True))
            jax.block_until_ready(call(arguments))
        return counted.bytes_read + counted.bytes_written

    # The scales of whole rows are read by what reads the kernel's result.
    scale_bytes = 4 * spec.num_outputs if not spec.group_size else 0
    return CopiedBytes(count=count, floor_bytes=_floor(spec) - scale_bytes)


SMALL: dict[str, Any] = {"num_rows": 1, "num_outputs": 256, "num_inputs": 512, "dtype": "bfloat16"}
SMALL_W8 = Spec(name="small_w8", bits=8, group_size=0, codes="int8", scales="float32", **SMALL)
SMALL_W4 = Spec(name="small_w4", zero=8, **SMALL)


def _check(columns: int, max_registers: int, *, copied: CopiedBytes | None = None, **sizes: Any) -> KernelCheck:
    served: dict[str, Any] = {"num_inputs": 4096, "dtype": "bfloat16"}
    spec = Spec(**served | sizes)
    return KernelCheck(
        name=spec.name,
        # An H100 gets the same code: as many multiprocessors, the same architecture.
        devices=("h100", "h200") if copied is not None else ("h200",),
        run=mosaic.packed_matmul,
        arguments=_arguments(spec),
        max_registers=max_registers,
        max_shared_bytes=MAX_SHARED_BYTES,
        required=(rf"wgmma\.m64n{columns}k16\.f32\.bf16\.bf16", COPIES),
        floor_bytes=_floor(spec),
        floor_flops=2 * spec.num_rows * spec.num_outputs * spec.num_inputs,
        copied=copied,
    )


W8: dict[str, Any] = {"bits": 8, "group_size": 0, "codes": "int8", "scales": "float32"}
FLOAT8: dict[str, Any] = {"bits": 8, "group_size": 128, "codes": "float8_e4m3fn", "scales": "float32"}
Q4_K: dict[str, Any] = {"scales": "uint8", "per_super": 8, "has_offsets": True}
MXFP4: dict[str, Any] = {"scales": "bfloat16", "codebook": FP4_VALUES}
GPTQ: dict[str, Any] = {"group_size": 128, "has_zeros": True}

KERNELS = (
    _check(8, 80, name="w8_one_row", num_rows=1, num_outputs=28672, copied=_copied(SMALL_W8), **W8),
    _check(16, 80, name="w8_16_rows", num_rows=16, num_outputs=4096, num_inputs=14336, **W8),
    _check(128, MAX_REGISTERS, name="w8_256_rows", num_rows=256, num_outputs=4096, **W8),
    _check(128, MAX_REGISTERS, name="w8_4096_rows", num_rows=4096, num_outputs=28672, **W8),
    _check(8, 96, name="w4_groups_of_32_one_row", num_rows=1, num_outputs=28672, zero=8, copied=_copied(SMALL_W4)),
    _check(16, 128, name="w4_groups_of_32_16_rows", num_rows=16, num_outputs=4096, zero=8),
    _check(64, MAX_REGISTERS, name="w4_groups_of_32_64_rows", num_rows=64, num_outputs=6144, zero=8),
    _check(128, MAX_REGISTERS, name="w4_groups_of_32_256_rows", num_rows=256, num_outputs=4096, zero=8),
    _check(128, MAX_REGISTERS, name="w4_groups_of_128_4096_rows", num_rows=4096, num_outputs=28672, zero=8, group_size=128),
    _check(16, 112, name="gptq_16_rows", num_rows=16, num_outputs=4096, **GPTQ),
    _check(128, MAX_REGISTERS, name="gptq_4096_rows", num_rows=4096, num_outputs=6144, **GPTQ),
    _check(8, MAX_REGISTERS, name="q4_k_one_row", num_rows=1, num_outputs=4096, **Q4_K),
    _check(64, MAX_REGISTERS, name="q4_k_4096_rows", num_rows=4096, num_outputs=4096, **Q4_K),
    _check(8, 96, name="mxfp4_one_row", num_rows=1, num_outputs=28672, **MXFP4),
    _check(16, 96, name="float8_blocks_16_rows", num_rows=16, num_outputs=28672, **FLOAT8),
    _check(128, MAX_REGISTERS, name="float8_blocks_4096_rows", num_rows=4096, num_outputs=4096, **FLOAT8),
    *grouped_budgets.KERNELS,
)
