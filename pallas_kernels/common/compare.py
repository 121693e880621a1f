"""How far an output is from its reference."""

from __future__ import annotations

import numpy as np


def row_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative error of a row: max over rows of |actual - expected| / |expected| (Euclidean, float64).

    Rows are all axes but the last. A whole-tensor norm would accept an all-zero output when one row dominates.
    A row whose reference is zero counts its absolute error. Any NaN gives infinity.
    """
    actual64 = np.asarray(actual, np.float64).reshape(-1, np.shape(actual)[-1])
    expected64 = np.asarray(expected, np.float64).reshape(actual64.shape)
    difference = np.linalg.norm(actual64 - expected64, axis=-1)
    size = np.linalg.norm(expected64, axis=-1)
    error = difference / np.where(size > 0, size, 1.0)
    return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))
