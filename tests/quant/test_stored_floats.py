"""float8 and MXFP4 weights against their published formulas."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.quant import fp8, mxfp4
from pallas_kernels.common.compare import row_error

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""e2m1: a sign, two bits of exponent with bias 1, one of mantissa."""
X = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32)


def float8_values(*shape: int) -> np.ndarray:
    codes = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 127) == 127] = 0
    return codes.view(ml_dtypes.float8_e4m3fn)


def same_shapes(weight: object, struct: object) -> None:
    assert jax.tree.structure(weight) == jax.tree.structure(struct)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(weight)] == [(b.shape, b.dtype) for b in jax.tree.leaves(struct)]


@pytest.mark.parametrize("scales", [(), (1,), (20,), (20, 1)], ids=str)
def test_float8_per_tensor_and_per_channel(scales: tuple[int, ...]) -> None:
    values, factors = float8_values(20, 256), np.random.default_rng(2).uniform(0.01, 1, scales).astype(np.float32)
    weight = fp8.pack(values, factors)
    expected = values.astype(np.float64) * np.broadcast_to(factors.reshape(-1, 1), (20, 1))
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=1e-7)
    assert row_error(np.asarray(jax.tree.map(jnp.asarray, weight).matmul(jnp.asarray(X))), X @ expected.T) <= 1e-6
    same_shapes(weight, fp8.abstract((20, 256)))


@pytest.mark.parametrize("num_outputs", [128, 200])
def test_float8_in_blocks(num_outputs: int) -> None:
    """The last block of rows may be cut."""
    values, factors = float8_values(num_outputs, 256), np.random.default_rng(2).uniform(0.01, 1, (-(-num_outputs // 128), 2))
    weight = fp8.pack(values, factors, (128, 128))
    expected = np.empty((num_outputs, 256))
    for n, k in itertools.product(range(num_outputs), range(256)):
        expected[n, k] = float(values[n, k]) * np.float32(factors[n // 128, k // 128])
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=1e-7)
    np.testing.assert_array_equal(fp8.dequantize(values, factors, (128, 128)), weight.dequantize())
    assert row_error(np.asarray(jax.tree.map(jnp.asarray, weight).matmul(jnp.asarray(X))), X @ expected.T) <= 1e-6
    same_shapes(weight, fp8.abstract((num_outputs, 256), (128, 128)))


def test_float8_that_cannot_be_packed() -> None:
    assert fp8.can_pack((3, 256), (128, 128)) and fp8.can_pack((3, 96))
    assert not fp8.can_pack((3, 192), (128, 128)) and not fp8.can_pack((3, 80)) and not fp8.can_pack((3, 96), (16, 16))
    values, factors = float8_values(3, 192), np.array([[2.0, 4.0]])
    expected = values.astype(np.float64) * np.array([2.0] * 128 + [4.0] * 64)
    np.testing.assert_array_equal(fp8.dequantize(values, factors, (128, 128)), expected)


@pytest.mark.parametrize("rows", [(6,), (2, 6)], ids=str)
def test_mxfp4(rows: tuple[int, ...]) -> None:
    draws = np.random.default_rng(3)
    blocks = draws.integers(0, 256, (*rows, 8, 16)).astype(np.uint8)
    scales = draws.integers(118, 132, (*rows, 8)).astype(np.uint8)
    expected = np.empty((*rows, 256))
    for index in np.ndindex(*rows, 8, 16):
        byte, power = int(blocks[index]), 2.0 ** (int(scales[index[:-1]]) - 127)
        first = index[-2] * 32 + index[-1] * 2
        expected[(*index[:-2], first)], expected[(*index[:-2], first + 1)] = FP4[byte & 15] * power, FP4[byte >> 4] * power
    weight = mxfp4.pack(blocks, scales)
    np.testing.assert_array_equal(weight.dequantize(), expected)
    same_shapes(weight, mxfp4.abstract((*rows, 256)))
    matrix, floats = (weight, expected) if len(rows) == 1 else (jax.tree.map(lambda leaf: leaf[1], weight), expected[1])
    assert row_error(np.asarray(jax.tree.map(jnp.asarray, matrix).matmul(jnp.asarray(X))), X @ floats.T) <= 1e-6
