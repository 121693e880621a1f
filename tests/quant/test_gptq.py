"""Rounding for inputs that are known, against GPTQ column by column in float64 and against rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.quant.gptq import DAMPING, from_moments
from jaxinfer.quant.int4 import Int4

METHODS = [Int4(32, True), Int4(32, False), Int4(64, True)]


def correlated(num_tokens: int, size: int, seed: int = 0) -> np.ndarray:
    """Inputs [T K] of very different sizes that a quarter as many hidden ones explain for the most part."""
    draws = np.random.default_rng(seed)
    hidden = draws.standard_normal((num_tokens, size // 4)) @ draws.standard_normal((size // 4, size))
    return (hidden + draws.standard_normal((num_tokens, size))) * np.exp(draws.standard_normal(size))


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def output_errors(method: Int4, weight: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's squared error in the outputs: rounded to nearest, and for these inputs."""
    nearest, calibrated = method.from_float(weight).dequantize(), from_moments(method, weight, x.T @ x).dequantize()
    return np.square(x @ (nearest - weight).T).sum(axis=0), np.square(x @ (calibrated - weight).T).sum(axis=0)


def column_by_column(weight: np.ndarray, moments: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The paper's equations 2 and 3, with the inverse of what is left of H recomputed for every column: values [N K]."""
    left, result = weight.astype(np.float64), np.empty(weight.shape)
    damped = moments + DAMPING * np.trace(moments) / len(moments) * np.eye(len(moments))
    waiting = list(np.argsort(-np.diag(moments), kind="stable"))
    size = weight.shape[1] // scales.shape[1]
    while waiting:
        inverse = np.linalg.inv(damped[np.ix_(waiting, waiting)])
        column = waiting[0]
        scale, offset = (part[:, column // size].astype(np.float64) for part in (scales, offsets))
        result[:, column] = np.clip(np.rint((left[:, column] - offset) / scale), 0, 15) * scale + offset
        left[:, waiting] -= np.outer((left[:, column] - result[:, column]) / inverse[0, 0], inverse[0])
        waiting.pop(0)
    return result


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_it_is_the_papers_algorithm(method: Int4) -> None:
    """320 inputs are two blocks and a half. A tie that float32 breaks otherwise changes all that comes after it in its row."""
    weight, x = matrix(24, 320), correlated(600, 320)
    packed = from_moments(method, weight, x.T @ x)
    scales = packed.matrix.scales
    offsets = packed.matrix.offsets if method.zero_point else scales * np.float16(-8)
    expected = column_by_column(weight, x.T @ x, scales, offsets)
    is_equal = np.isclose(packed.dequantize(), expected, rtol=1e-5, atol=1e-6).all(axis=1)
    assert is_equal.mean() > 0.8


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_outputs_are_nearer_than_rounded_to_nearest(method: Int4) -> None:
    nearest, calibrated = output_errors(method, matrix(48, 256), correlated(1024, 256))
    assert calibrated.sum() < 0.4 * nearest.sum()


def test_few_tokens_and_inputs_that_are_always_zero() -> None:
    """H is singular; what the tokens do not say is rounded to nearest, as all is where there are none."""
    method, weight = Int4(32, True), matrix(16, 128)
    x = correlated(20, 128)
    x[:, 5:40] = 0
    nearest, calibrated = output_errors(method, weight, x)
    assert (calibrated <= nearest).all()
    silent = from_moments(method, weight, np.zeros((128, 128)))
    np.testing.assert_array_equal(silent.dequantize(), method.from_float(weight).dequantize())


@pytest.mark.parametrize("seed", range(4))
def test_no_row_is_worse_than_to_nearest(seed: int) -> None:
    """Inputs that are hardly correlated: taking up errors gains little there, and loses in some of many rows."""
    draws = np.random.default_rng(seed)
    nearest, calibrated = output_errors(Int4(32, True), matrix(1000, 64), draws.standard_normal((2000, 64)))
    assert (calibrated <= nearest * (1 + 1e-5)).all()
