"""W4A16: 4-bit weights in groups along the inputs, symmetric or with an offset per group, activations in floats.

No calibration: each group is rounded to the grid that fits it best. The base grid reaches the group's extremes; the ends of a
normal distribution are rare, and a grid that cuts them off is finer for all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.quant.nibbles import in_runs, pack_nibbles
from jaxinfer.quant.packed import PackedWeight
from jaxinfer.quant.weight import Method
from pallas_kernels.packed_matmul import RUN, PackedMatrix

MAX_CODE = np.float32(15)
ZERO = 8
"""The code of zero in a symmetric grid, which reaches one step further on the side of the largest magnitude."""
WIDTHS = (1.0, 1.07, 0.96, 0.92, 0.88, 0.84, 0.79, 0.74)
"""What is tried, in widths of the base grid, itself first. Twenty of them gain 0.04 dB more and cost two and a half times as much."""
CHUNK = 1 << 16
"""Weights that are rounded at a time: a few arrays of them stay in the cache."""


@dataclass(frozen=True, slots=True)
class Int4:
    """Groups of `group_size` weights with a float16 scale each, and a float16 offset each if `zero_point`.

    Where that does not divide the inputs groups are half or a quarter of it, 32 at least: SmolLM2's 576 have none of 128.
    `rounding` is "nearest", the grid from one extreme to the other, or "mse", of several mostly narrower ones that with the
    least squared error.
    """

    group_size: int = 32
    zero_point: bool = False
    rounding: Literal["nearest", "mse"] = "mse"

    def from_float(self, weight: np.ndarray) -> PackedWeight:
        """Quantize [N K], or a stack [X N K], on the host."""
        return self.pack(*self.grids(weight))

    def grids(self, weight: np.ndarray, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nearest codes, uint8 [... N K], with the scales and the values of code 0 of the groups, float16 [... N K/G].

        `importance` [K] says how much the squared error of each input's weights counts, all alike by default.
        """
        weight = np.asarray(weight, np.float32)
        size = self._group_size(weight.shape[-1])
        groups = weight.reshape(-1, size)
        codes = np.empty(groups.shape, np.uint8)
        scales, offsets = np.empty(len(groups), np.float16), np.empty(len(groups), np.float16)
        counts = None if importance is None else np.asarray(importance, np.float32).reshape(-1, size).T
        step = CHUNK // size
        for start in range(0, len(groups), step):
            part = slice(start, min(start + step, len(groups)))
            of_part = None if counts is None else counts[:, np.arange(part.start, part.stop) % counts.shape[1]]
            # Groups side by side: operations on whole rows of them, where numpy is fast.
            steps, scales[part], offsets[part] = self._round(np.ascontiguousarray(groups[part].T), of_part)
            codes[part] = steps.T
        rows = (*weight.shape[:-1], -1)
        return codes.reshape(weight.shape), scales.reshape(rows), offsets.reshape(rows)

    def pack(self, codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> PackedWeight:
        """What `grids` gives, or other codes on the same grids, as it is stored."""
        return PackedWeight(
            PackedMatrix(
                codes=pack_nibbles(in_runs(codes)),
                scales=scales,
                offsets=offsets if self.zero_point else None,
                group_size=codes.shape[-1] // scales.shape[-1],
                zero=0 if self.zero_point else ZERO,
            )
        )

    def abstract(self, shape: tuple[int, ...]) -> PackedWeight:
        """Shapes and dtypes of the parts."""
        *rows, num_inputs = shape
        size = self._group_size(num_inputs)
        numbers = jax.ShapeDtypeStruct((*rows, num_inputs // size), jnp.float16)
        return PackedWeight(
            PackedMatrix(
                codes=jax.ShapeDtypeStruct((*rows, num_inputs // RUN, RUN // 2), jnp.uint8),
                scales=numbers,
                offsets=numbers if self.zero_point else None,
                group_size=size,
                zero=0 if self.zero_point else ZERO,
            )
        )

    def accepts(self, shape: tuple[int, ...], num_shards: int) -> bool:
        """Whole groups on every device."""
        return shape[-1] % (self._group_size(shape[-1]) * num_shards) == 0

    def _group_size(self, num_inputs: int) -> int:
        size = self.group_size
        while num_inputs % size and size > RUN:
            size //= 2
        return size

    def _round(self, groups: np.ndarray, counts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales and offsets of groups [G C], of the best of the grids that are tried; `counts` weigh the errors."""
        lows, widths = _base_grids(groups, self.zero_point)
        best_scales, best_offsets = _grid(lows, widths, self.zero_point, WIDTHS[0])
        if self.rounding == "mse":
            least = _squared_errors(groups, best_scales, best_offsets, counts)
            for relative in WIDTHS[1:]:
                scales, offsets = _grid(lows, widths, self.zero_point, relative)
                errors = _squared_errors(groups, scales, offsets, counts)
                is_better = errors < least
                np.copyto(least, errors, where=is_better)
                np.copyto(best_scales, scales, where=is_better)
                np.copyto(best_offsets, offsets, where=is_better)
        return _steps(groups, best_scales, best_offsets)[1].astype(np.uint8), best_scales, best_offsets


def _base_grids(groups: np.ndarray, zero_point: bool) -> tuple[np.ndarray, np.ndarray]:
    """The value of code 0 and the distance to that of code 15, negative if the grid runs downwards."""
    largest, smallest = groups.max(axis=0), groups.min(axis=0)
    if zero_point:
        return smallest, largest - smallest
    extremes = np.where(largest > -smallest, largest, smallest)
    # Code 0 stands for minus eight steps: the extreme itself, whatever its sign.
    return extremes, extremes * -(MAX_CODE / np.float32(ZERO))


def _grid(lows: np.ndarray, widths: np.ndarray, zero_point: bool, relative: float) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets in float16 of the base grids, made wider or narrower about their middle or, if symmetric, about zero."""
    # A group of zeros, or of one value: any step will do, but zero divides.
    scales = (widths * np.float32(relative / 15)).astype(np.float16)
    scales[scales == 0] = 1
    if not zero_point:
        return scales, (scales * np.float16(-ZERO)).astype(np.float16)
    return scales, (lows + widths * np.float32((1 - relative) / 2)).astype(np.float16)


def _steps(groups: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every weight in steps from code 0, and the nearest codes, as floats."""
    steps = groups - offsets.astype(np.float32)
    steps *= np.float32(1) / scales.astype(np.float32)
    codes = np.rint(steps)
    return steps, np.clip(codes, 0, MAX_CODE, out=codes)


def _squared_errors(groups: np.ndarray, scales: np.ndarray, offsets: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    steps, codes = _steps(groups, scales, offsets)
    codes -= steps
    return np.einsum("gc,gc->c", codes, codes if counts is None else codes * counts) * np.square(scales.astype(np.float32))


def make_method(group_size: int, zero_point: bool) -> Method:
    """The method with its default rounding."""
    return Int4(group_size, zero_point)
