"""Small integers -> the nibbles and bit planes of a `PackedMatrix`."""

from __future__ import annotations

import numpy as np

from pallas_kernels.packed_matmul import RUN


def in_runs(codes: np.ndarray) -> np.ndarray:
    """[... K] -> [... R 32]."""
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // RUN, RUN)


def pack_nibbles(runs: np.ndarray) -> np.ndarray:
    """uint8 [... R 32], values below 16 -> uint8 [... R 16]: weight j in a low nibble, weight j + 16 in the high one above it."""
    return runs[..., : RUN // 2] | (runs[..., RUN // 2 :] << np.uint8(4))


def pack_plane(runs: np.ndarray) -> np.ndarray:
    """uint8 [... R 32], zeros and ones -> uint8 [... R 4], bit i for weight i."""
    return np.packbits(runs, axis=-1, bitorder="little")
