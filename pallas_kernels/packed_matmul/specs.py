"""Named argument sets of the packed product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.packed_matmul.matrix import RUN, PackedMatrix

MAX_ROW_ERROR = 2e-6
"""float32 sums of up to 1,536 products in some order, each weight rounded once or twice in float32."""

FP4_VALUES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """M rows, N outputs, K inputs, and how the matrix is stored."""

    name: str
    num_rows: int
    num_outputs: int
    num_inputs: int
    bits: int = 4
    group_size: int = 32
    codes: str = "uint8"
    scales: str = "float16"
    per_super: int = 0
    """Groups that share a super-scale; the scales are then uint8 or int8."""
    has_offsets: bool = False
    has_zeros: bool = False
    zero: int = 0
    codebook: tuple[float, ...] | None = None
    dtype: str = "float32"
    """Of the activations."""


SPECS = (
    Spec(name="symmetric_one_row", num_rows=1, num_outputs=96, num_inputs=64, zero=8),
    Spec(name="offsets_seven_rows", num_rows=7, num_outputs=33, num_inputs=576, has_offsets=True),
    Spec(name="zeros_of_128", num_rows=33, num_outputs=45, num_inputs=1536, group_size=128, has_zeros=True),
    Spec(name="group_of_row", num_rows=7, num_outputs=37, num_inputs=96, group_size=0, scales="float32", zero=8),
    Spec(name="five_bits", num_rows=33, num_outputs=35, num_inputs=96, bits=5, has_offsets=True),
    Spec(name="five_bits_two_levels", num_rows=1, num_outputs=34, num_inputs=512, bits=5, scales="uint8", per_super=8, has_offsets=True),
    Spec(name="four_bits_two_levels", num_rows=7, num_outputs=65, num_inputs=256, scales="uint8", per_super=8, has_offsets=True),
    Spec(
        name="six_bits_two_levels", num_rows=33, num_outputs=39, num_inputs=512, bits=6, group_size=16, scales="int8", per_super=16, zero=32
    ),
    Spec(name="int8_per_row", num_rows=1, num_outputs=71, num_inputs=576, bits=8, group_size=0, codes="int8", scales="float32"),
    Spec(name="int8_groups", num_rows=33, num_outputs=40, num_inputs=96, bits=8, codes="int8"),
    Spec(name="uint8_zeros", num_rows=7, num_outputs=40, num_inputs=256, bits=8, group_size=64, has_zeros=True),
    Spec(name="float8_blocks", num_rows=7, num_outputs=40, num_inputs=384, bits=8, group_size=128, codes="float8_e4m3fn", scales="float32"),
    Spec(name="codebook", num_rows=7, num_outputs=33, num_inputs=96, scales="bfloat16", codebook=FP4_VALUES),
    Spec(name="decode", num_rows=32, num_outputs=960, num_inputs=576, has_offsets=True),
)

_MOSAIC = (
    Spec(name="int8_per_row", num_rows=3, num_outputs=71, num_inputs=512, bits=8, group_size=0, codes="int8", scales="float32"),
    Spec(name="int8_groups", num_rows=9, num_outputs=64, num_inputs=128, bits=8, codes="int8"),
    Spec(name="uint8_zeros", num_rows=3, num_outputs=64, num_inputs=128, bits=8, group_size=64, has_zeros=True),
    Spec(name="float8_per_row", num_rows=1, num_outputs=64, num_inputs=96, bits=8, group_size=0, codes="float8_e4m3fn", scales="float32"),
    Spec(name="float8_blocks", num_rows=3, num_outputs=64, num_inputs=256, bits=8, group_size=128, codes="float8_e4m3fn", scales="float32"),
    Spec(name="symmetric", num_rows=3, num_outputs=45, num_inputs=256, zero=8),
    Spec(name="group_of_row", num_rows=3, num_outputs=64, num_inputs=128, group_size=0, scales="float32", zero=8),
    Spec(name="zeros_of_128", num_rows=3, num_outputs=96, num_inputs=384, group_size=128, has_zeros=True),
    Spec(name="offsets", num_rows=3, num_outputs=64, num_inputs=192, has_offsets=True),
    Spec(name="two_levels", num_rows=3, num_outputs=64, num_inputs=512, scales="uint8", per_super=8, has_offsets=True),
    Spec(name="codebook", num_rows=3, num_outputs=64, num_inputs=128, scales="bfloat16", codebook=FP4_VALUES),
    Spec(name="large_groups", num_rows=20, num_outputs=64, num_inputs=512, group_size=256, zero=8),
)
MOSAIC_SPECS = tuple(replace(spec, dtype="bfloat16") for spec in _MOSAIC)
"""Small, for the interpreter; every format that the kernel for GPUs takes. Activations are rounded to bfloat16."""


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, Any]:
    """Activations with outliers and a row of zeros where there are several; codes over their whole range, scales that differ a
    hundredfold, so that a wrong group shows."""
    draws = np.random.default_rng(seed)
    x = draws.standard_normal((spec.num_rows, spec.num_inputs)).astype(np.float32)
    x[:, 0] *= 40
    if spec.num_rows > 1:
        x[1] = 0
    return {"x": x.astype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype), "matrix": make_matrix(spec, draws)}


def make_matrix(spec: Spec, draws: np.random.Generator) -> PackedMatrix:
    """Random bytes with finite numbers in them."""
    num_outputs, num_runs = spec.num_outputs, spec.num_inputs // RUN
    groups = (num_outputs, spec.num_inputs // spec.group_size if spec.group_size else 1)
    scales, super_scales = _levels(spec, groups, draws)
    offsets, super_offsets = _levels(spec, groups, draws) if spec.has_offsets else (None, None)
    return PackedMatrix(
        codes=_codes(spec, draws),
        high=draws.integers(0, 256, (num_outputs, num_runs, spec.bits - 4, 4)).astype(np.uint8) if spec.bits in (5, 6) else None,
        scales=scales,
        super_scales=super_scales,
        offsets=offsets,
        super_offsets=super_offsets,
        zeros=draws.integers(0, 16, groups).astype(np.uint8) if spec.has_zeros else None,
        bits=spec.bits,
        group_size=spec.group_size,
        zero=spec.zero,
        codebook=spec.codebook,
    )


def _codes(spec: Spec, draws: np.random.Generator) -> np.ndarray:
    if spec.bits < 8:
        return draws.integers(0, 256, (spec.num_outputs, spec.num_inputs // RUN, RUN // 2)).astype(np.uint8)
    codes = draws.integers(0, 256, (spec.num_outputs, spec.num_inputs)).astype(np.uint8)
    if spec.codes == "float8_e4m3fn":
        codes[(codes & 0x7F) == 0x7F] = 1  # not a number
        return codes.view(ml_dtypes.float8_e4m3fn)
    return codes.view(spec.codes)


def _levels(spec: Spec, groups: tuple[int, int], draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    sizes = 10 ** draws.uniform(-3, -1, groups) * draws.choice([-1, 1], groups)
    if not spec.per_super:
        return sizes.astype(ml_dtypes.bfloat16 if spec.scales == "bfloat16" else spec.scales), None
    small = draws.integers(0, 256, groups).astype(np.uint8).view(spec.scales)
    # Some as small as in real files, where a half is a denormal.
    return small, 10 ** draws.uniform(-6, -3, (groups[0], groups[1] // spec.per_super)).astype(np.float16)
