"""MXFP4: 4-bit floats (e2m1) in blocks of 32 with a power of two each, as gpt_oss stores its experts.

Format: OCP Microscaling Formats 1.0; the tensors' layout is that of transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.quant.nibbles import pack_nibbles
from jaxinfer.quant.packed import PackedWeight
from pallas_kernels.packed_matmul import RUN, PackedMatrix

FP4_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
"""Twice the values of the 16 codes: whole numbers."""


def pack(blocks: np.ndarray, scales: np.ndarray) -> PackedWeight:
    """uint8 [... N K/32 16], weight 2j in the low nibble of byte j and 2j + 1 in its high one, and exponents uint8 [... N K/32]."""
    runs = np.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1).reshape(*blocks.shape[:-1], RUN)
    # The scale is 2 ** (exponent - 127), halved for the doubled values.
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 128).astype(ml_dtypes.bfloat16)
    return _weight(pack_nibbles(runs), powers)


def abstract(shape: tuple[int, ...]) -> PackedWeight:
    """What `pack` gives for a matrix [N K], or a stack [X N K], as ShapeDtypeStructs."""
    *rows, num_inputs = shape
    codes = jax.ShapeDtypeStruct((*rows, num_inputs // RUN, RUN // 2), jnp.uint8)
    return _weight(codes, jax.ShapeDtypeStruct((*rows, num_inputs // RUN), jnp.bfloat16))


def _weight(codes: object, scales: object) -> PackedWeight:
    return PackedWeight(PackedMatrix(codes=codes, scales=scales, group_size=RUN, codebook=FP4_DOUBLED))
