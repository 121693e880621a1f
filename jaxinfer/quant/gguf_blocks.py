"""GGUF's quantized types as packed matrices: their integers and scales moved into one layout, never inflated to floats.

Layouts: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.quant.mxfp4 import FP4_DOUBLED
from jaxinfer.quant.nibbles import pack_nibbles, pack_plane
from jaxinfer.quant.packed import PackedWeight
from pallas_kernels.packed_matmul import PackedMatrix

IQ4_VALUES = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)


def pack(kind: GGMLQuantizationType, stored: np.ndarray) -> PackedWeight | None:
    """Rows of blocks, uint8 [... N bytes], as they lie in the file; None for a type that is not kept packed."""
    layout = LAYOUTS.get(kind)
    if layout is None:
        return None
    _, block_bytes = GGML_QUANT_SIZES[kind]
    return PackedWeight(PackedMatrix(**layout(stored.reshape(*stored.shape[:-1], -1, block_bytes))))


def abstract(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> PackedWeight | None:
    """What `pack` gives for a matrix [N K], or a stack [X N K], as ShapeDtypeStructs."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if kind not in LAYOUTS or shape[-1] % block_size:
        return None
    row = pack(kind, np.zeros((1, shape[-1] // block_size * block_bytes), np.uint8))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*shape[:-1], *leaf.shape[1:]), leaf.dtype), row)


Parts = dict[str, Any]
"""The fields of a PackedMatrix."""


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, [... B]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _bytes(blocks: np.ndarray, start: int, stop: int | None = None) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., start:stop])


def _joined(blocks: np.ndarray) -> np.ndarray:
    """[... B n] -> [... B*n]."""
    return blocks.reshape(*blocks.shape[:-2], -1)


def _per_run(runs: np.ndarray) -> np.ndarray:
    """[... B R n], the runs of each block -> [... B*R n]."""
    return runs.reshape(*runs.shape[:-3], -1, runs.shape[-1])


def _q4_0(blocks: np.ndarray) -> Parts:
    return {"codes": _bytes(blocks, 2), "scales": _halves(blocks, 0), "group_size": 32, "zero": 8}


def _q4_1(blocks: np.ndarray) -> Parts:
    return {"codes": _bytes(blocks, 4), "scales": _halves(blocks, 0), "offsets": _halves(blocks, 2), "group_size": 32}


def _q5_0(blocks: np.ndarray) -> Parts:
    high = _bytes(blocks, 2, 6)[..., None, :]
    return {"codes": _bytes(blocks, 6), "high": high, "scales": _halves(blocks, 0), "bits": 5, "group_size": 32, "zero": 16}


def _q5_1(blocks: np.ndarray) -> Parts:
    high = _bytes(blocks, 4, 8)[..., None, :]
    scales, offsets = _halves(blocks, 0), _halves(blocks, 2)
    return {"codes": _bytes(blocks, 8), "high": high, "scales": scales, "offsets": offsets, "bits": 5, "group_size": 32}


def _q8_0(blocks: np.ndarray) -> Parts:
    return {"codes": _joined(_bytes(blocks, 2).view(np.int8)), "scales": _halves(blocks, 0), "bits": 8, "group_size": 32}


def _k_levels(blocks: np.ndarray) -> Parts:
    """The two levels of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes, a float16 for each kind."""
    scales, minima, rest = (blocks[..., start : start + 4] for start in (4, 8, 12))
    low_scales, low_minima = scales & np.uint8(63), minima & np.uint8(63)
    high_scales = (rest & np.uint8(15)) | ((scales >> np.uint8(6)) << np.uint8(4))
    high_minima = (rest >> np.uint8(4)) | ((minima >> np.uint8(6)) << np.uint8(4))
    return {
        "scales": _joined(np.concatenate([low_scales, high_scales], axis=-1)),
        "super_scales": _halves(blocks, 0),
        "offsets": _joined(np.concatenate([low_minima, high_minima], axis=-1)),
        "super_offsets": -_halves(blocks, 2),
        "group_size": 32,
    }


def _k_nibbles(stored: np.ndarray) -> np.ndarray:
    """Bytes [... B 128]: 32 of them hold one run of 32 in their low nibbles and the next run in their high ones."""
    pairs = stored.reshape(*stored.shape[:-1], 4, 1, 32)
    runs = np.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=-2)
    return _per_run(pack_nibbles(runs.reshape(*stored.shape[:-1], 8, 32)))


def _q4_k(blocks: np.ndarray) -> Parts:
    return _k_levels(blocks) | {"codes": _k_nibbles(blocks[..., 16:])}


def _q5_k(blocks: np.ndarray) -> Parts:
    # Bit i of byte j belongs to weight j of run i.
    ones = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _k_levels(blocks) | {"codes": _k_nibbles(blocks[..., 48:]), "high": _per_run(pack_plane(ones))[..., None, :], "bits": 5}


def _q6_k(blocks: np.ndarray) -> Parts:
    # Each half of a block has four runs: two in the low nibbles of 64 bytes, two in the high ones; 2 bits of each in 32 bytes.
    halves = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-2).reshape(*blocks.shape[:-1], 8, 32)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = pairs.reshape(*blocks.shape[:-1], 8, 32)
    planes = np.stack([pack_plane((high >> np.uint8(plane)) & np.uint8(1)) for plane in range(2)], axis=-2)
    return {
        "codes": _per_run(pack_nibbles(low)),
        "high": planes.reshape(*planes.shape[:-4], -1, 2, 4),
        "scales": _joined(_bytes(blocks, 192, 208).view(np.int8)),
        "super_scales": _halves(blocks, 208),
        "bits": 6,
        "group_size": 16,
        "zero": 32,
    }


def _mxfp4(blocks: np.ndarray) -> Parts:
    exponents = blocks[..., 0].astype(np.uint16)
    # Half of 2 ** (exponent - 127) as a bfloat16, since the values are doubled; the two smallest are denormals.
    bits = np.where(exponents < 2, np.uint16(0x20) << exponents, (exponents - np.uint16(1)) << np.uint16(7)).astype(np.uint16)
    return {"codes": _bytes(blocks, 1), "scales": bits.view(ml_dtypes.bfloat16), "group_size": 32, "codebook": FP4_DOUBLED}


def _iq4_nl(blocks: np.ndarray) -> Parts:
    return {"codes": _bytes(blocks, 2), "scales": _halves(blocks, 0), "group_size": 32, "codebook": IQ4_VALUES}


def _iq4_xs(blocks: np.ndarray) -> Parts:
    high_bits = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low_bits = blocks[..., 4:8, None] >> np.array([0, 4], np.uint8)
    low_bits = low_bits.reshape(high_bits.shape) & np.uint8(15)
    scales = (low_bits | (high_bits.astype(np.uint8) & np.uint8(3)) << np.uint8(4)).astype(np.int8) - np.int8(32)
    codes = _bytes(blocks, 8).reshape(*blocks.shape[:-1], 8, 16)
    return {
        "codes": _per_run(codes),
        "scales": _joined(scales),
        "super_scales": _halves(blocks, 0),
        "group_size": 32,
        "codebook": IQ4_VALUES,
    }


LAYOUTS: Mapping[GGMLQuantizationType, Callable[[np.ndarray], Parts]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.MXFP4: _mxfp4,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
}
