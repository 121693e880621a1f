"""Rounding to 4 bits by what a matrix does to real inputs instead of weight by weight: GPTQ (arXiv:2210.17323).

The grids are chosen beforehand. Then the weights of one input after the other are rounded, and what that did to the outputs is
taken up, as far as the inputs are correlated, by the weights of the inputs that are still to come.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quant.int4 import MAX_CODE, Int4
from jaxinfer.quant.packed import PackedWeight

BLOCK = 128
"""Inputs whose errors reach the inputs behind them in one product."""
DAMPING = 0.01
"""Part of the mean second moment that is added to each: few tokens leave directions that say nothing."""


def from_moments(method: Int4, weight: np.ndarray, moments: np.ndarray) -> PackedWeight:
    """Quantize [N K] for inputs x whose second moments, the sum of x x^T over them, are `moments` [K K].

    The parts are those of `Int4.from_float`. No row is further from the floats on these inputs than `from_float` leaves it.
    """
    weight = np.asarray(weight, np.float32)
    moments = np.asarray(moments, np.float64)
    nearest, scales, offsets = method.grids(weight, _importance(moments))
    ways = [(_round(weight, moments, scales, offsets), scales, offsets), (nearest, scales, offsets), method.grids(weight)]
    best = np.argmin([_row_errors(weight - _values(*way), moments) for way in ways], axis=0)
    return method.pack(*(np.stack(parts)[best, np.arange(len(weight))] for parts in zip(*ways, strict=True)))


def _importance(moments: np.ndarray) -> np.ndarray:
    """How much each input counts in the search for grids: its mean square, with the damping."""
    squares = np.diagonal(moments)
    return squares + (DAMPING * squares.mean() or 1.0)


def _round(weight: np.ndarray, moments: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Codes [N K] on the grids given, the inputs with the largest squares first: their errors have most to take them up."""
    order = np.argsort(-np.diagonal(moments), kind="stable")
    lower = np.ascontiguousarray(_inverse_factor(moments[np.ix_(order, order)]).T, np.float32)  # rows are what is read
    group_of = order // (weight.shape[1] // scales.shape[1])
    left = np.ascontiguousarray(weight[:, order].T)  # inputs first: one input's weights lie side by side
    steps, lows = (np.ascontiguousarray(part.T.astype(np.float32)) for part in (scales, offsets))
    codes = np.empty(left.shape, np.uint8)
    for start in range(0, len(left), BLOCK):
        stop = min(start + BLOCK, len(left))
        errors = np.empty((stop - start, left.shape[1]), np.float32)
        for at in range(start, stop):
            wanted = left[at] - lower[at, start:at] @ errors[: at - start]
            step, low = steps[group_of[at]], lows[group_of[at]]
            code = np.clip(np.rint((wanted - low) / step), 0, MAX_CODE)
            errors[at - start] = (wanted - (code * step + low)) / lower[at, at]
            codes[at] = code
        left[stop:] -= lower[stop:, start:stop] @ errors
    result = np.empty(weight.shape, np.uint8)
    result[:, order] = codes.T
    return result


def _inverse_factor(moments: np.ndarray) -> np.ndarray:
    """U, upper triangular, with U^T U the inverse of the damped moments.

    From the other end H = R R^T with R upper triangular, a Cholesky factor too, and U is the inverse of R: no inverse of H, which
    has its condition number squared, is made.
    """
    damped = moments.copy()
    damped[np.diag_indices_from(damped)] += DAMPING * np.diagonal(moments).mean() or 1.0
    factor = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return _inverse_of_upper(factor)


def _inverse_of_upper(matrix: np.ndarray) -> np.ndarray:
    """By halves: a sixth of the work of inverting any matrix."""
    if len(matrix) <= BLOCK:
        return np.triu(np.linalg.inv(matrix))
    half = len(matrix) // 2
    first, last = _inverse_of_upper(matrix[:half, :half]), _inverse_of_upper(matrix[half:, half:])
    return np.block([[first, -(first @ matrix[:half, half:]) @ last], [np.zeros((len(last), half)), last]])


def _values(codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """float32 [N K]."""
    groups = codes.reshape(*scales.shape, -1).astype(np.float32)
    return (groups * scales.astype(np.float32)[..., None] + offsets.astype(np.float32)[..., None]).reshape(codes.shape)


def _row_errors(difference: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Each row's squared error summed over the inputs, [N]."""
    return np.einsum("nk,nk->n", difference @ moments.astype(np.float32), difference)
