"""float8_e4m3fn weights with float scales per tensor, per output channel or per block, activations in floats.

They stay a byte each in memory on every device and are turned into floats inside the product: in registers on a CPU and on Hopper, in XLA's
dequantization elsewhere. Activations are not rounded to 8 bits, whatever the checkpoint was made for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.quant.packed import PackedWeight
from pallas_kernels.packed_matmul import RUN, PackedMatrix


def pack(values: np.ndarray, scales: np.ndarray, block: tuple[int, int] | None = None) -> PackedWeight:
    """Values [... N K] times scales.

    Args:
        values: float8_e4m3fn.
        scales: of one value or of the shape [... N] or [... N 1] without `block`; with it [... N/rows K/columns], rounded up.
        block: rows and columns that share a scale; the columns divide K, see `can_pack`.
    """
    scales = np.asarray(scales, np.float32)
    num_rows = values.shape[-2]
    if block is not None:
        # Every array has the rows on its axis, so that rows can be cut anywhere.
        scales = np.repeat(scales, block[0], axis=-2)[..., :num_rows, :]
        return _weight(values, np.ascontiguousarray(scales), block)
    scales = scales.reshape(values.shape[:-1]) if scales.size != 1 else np.full(values.shape[:-1], scales.reshape(-1)[0], np.float32)
    return _weight(values, scales[..., None], None)


def abstract(shape: tuple[int, ...], block: tuple[int, int] | None = None) -> PackedWeight:
    """What `pack` gives for a matrix [N K], or a stack [X N K], as ShapeDtypeStructs."""
    num_groups = shape[-1] // block[1] if block is not None else 1
    scales = jax.ShapeDtypeStruct((*shape[:-1], num_groups), jnp.float32)
    return _weight(jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn), scales, block)


def can_pack(shape: tuple[int, ...], block: tuple[int, int] | None = None) -> bool:
    """Whether the inputs are whole blocks, and whole runs of the kernel."""
    return shape[-1] % RUN == 0 and (block is None or (shape[-1] % block[1] == 0 and block[1] % RUN == 0))


def dequantize(values: np.ndarray, scales: np.ndarray, block: tuple[int, int] | None = None) -> np.ndarray:
    """The float32 matrix [... N K], also where `can_pack` is false: the last block of a row may be cut."""
    if block is None:
        return pack(values, scales).dequantize()
    by_columns = np.repeat(np.asarray(scales, np.float32), block[1], axis=-1)[..., : values.shape[-1]]
    return values.astype(np.float32) * np.repeat(by_columns, block[0], axis=-2)[..., : values.shape[-2], :]


def _weight(values: object, scales: object, block: tuple[int, int] | None) -> PackedWeight:
    return PackedWeight(PackedMatrix(codes=values, scales=scales, bits=8, group_size=block[1] if block is not None else 0))
