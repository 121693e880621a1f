"""Unsigned integers of 4 or 8 bits with a scale, and perhaps a zero point, per group: what other tools quantize to."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxinfer.quant.nibbles import in_runs, pack_nibbles
from jaxinfer.quant.packed import PackedWeight
from pallas_kernels.packed_matmul import RUN, PackedMatrix


def pack(codes: np.ndarray, scales: np.ndarray, *, bits: int, zero: int = 0, zeros: np.ndarray | None = None) -> PackedWeight:
    """scales * (codes - zero - zeros): codes uint8 [... N K] below 2**bits, scales and uint8 zeros [... N C], one for K / C inputs."""
    is_nibbles = _is_nibbles(codes.shape, bits)
    return _weight(pack_nibbles(in_runs(codes)) if is_nibbles else codes, scales, zeros, zero, codes.shape[-1], is_nibbles)


def abstract(shape: tuple[int, ...], num_groups: int, dtype: Any, *, bits: int, zero: int = 0, has_zeros: bool = False) -> PackedWeight:
    """What `pack` gives for [N K], or a stack [X N K], with C groups a row and scales of a dtype, as ShapeDtypeStructs."""
    is_nibbles = _is_nibbles(shape, bits)
    *rows, num_inputs = shape
    codes = jax.ShapeDtypeStruct((*rows, num_inputs // RUN, RUN // 2) if is_nibbles else shape, np.uint8)
    scales = jax.ShapeDtypeStruct((*rows, num_groups), dtype)
    zeros = jax.ShapeDtypeStruct((*rows, num_groups), np.uint8) if has_zeros else None
    return _weight(codes, scales, zeros, zero, num_inputs, is_nibbles)


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [... W * 32 / bits] out of 32-bit words [... W], the lowest bits first; 4 or 8 bits."""
    stored = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stored
    return np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1).reshape(*stored.shape[:-1], -1)


def _is_nibbles(shape: tuple[int, ...], bits: int) -> bool:
    """Rows that are no whole runs take a byte for each code."""
    return bits == 4 and shape[-1] % RUN == 0


def _weight(codes: Any, scales: Any, zeros: Any, zero: int, num_inputs: int, is_nibbles: bool) -> PackedWeight:
    num_groups = scales.shape[-1]
    group_size = num_inputs // num_groups if num_groups > 1 else 0
    return PackedWeight(
        PackedMatrix(codes=codes, scales=scales, zeros=zeros, bits=4 if is_nibbles else 8, group_size=group_size, zero=zero)
    )
