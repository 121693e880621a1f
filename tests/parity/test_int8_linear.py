"""One W8A8 product against the oracle: with the same float32 input nothing but the last float rounding may differ."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quant.int8 import Int8Weight
from pallas_kernels.int8_matmul import int8_matmul
from tests.parity.oracle import int8_linear, quantize_rows, row_errors

MAX_ROW_ERROR = 1e-6
SIXTEENTHS = 16


def off_the_edges(x: np.ndarray) -> np.ndarray:
    """`x` moved to the middles of sixteenths of an int8 step: next to a rounding edge, of the first term or of the second, an ulp of
    the scale would decide."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    scale = largest / np.float32(127)
    middles = (np.floor(x / scale * SIXTEENTHS) + 0.5) / SIXTEENTHS
    return np.where(np.abs(x) < largest, middles * scale, x).astype(np.float32)


def activations(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Rows of very different size, some with one large outlier as real activations have."""
    x = rng.normal(size=(rows, columns)) * 10.0 ** rng.uniform(-4, 4, (rows, 1))
    x[::3, 7] *= 100
    return off_the_edges(x.astype(np.float32))


def _product(x: np.ndarray, weight: np.ndarray, num_terms: int) -> np.ndarray:
    quantized = Int8Weight.from_float(weight)
    return np.asarray(int8_matmul(jnp.asarray(x), jnp.asarray(quantized.values), jnp.asarray(quantized.scales), num_terms=num_terms))


# (rows, K, N): one row and a few, odd sizes, SmolLM2's own q/o, kv, gate/up and down.
@pytest.mark.parametrize("shape", [(1, 576, 576), (5, 576, 192), (33, 576, 1536), (8, 1536, 576), (3, 17, 5)], ids=str)
@pytest.mark.parametrize("num_terms", [1, 2])
def test_int8_product_is_the_oracle(shape: tuple[int, int, int], num_terms: int) -> None:
    rows, columns, channels = shape
    rng = np.random.default_rng(rows + columns + channels)
    x = activations(rng, rows, columns)
    weight = rng.normal(size=(channels, columns)).astype(np.float32)
    weight[channels // 2] = 0
    got = _product(x, weight, num_terms)
    assert row_errors(got, int8_linear(x, weight, num_terms)).max() <= MAX_ROW_ERROR
    assert row_errors(got, int8_linear(x, weight, 3 - num_terms)).min() > MAX_ROW_ERROR, "the other rounding must not pass"


@pytest.mark.parametrize("num_terms", [1, 2])
def test_a_row_of_zeros_gives_zeros(num_terms: int) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 3] = 5
    weight = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    got = _product(x, weight, num_terms)
    assert not got[0].any()
    np.testing.assert_allclose(got[1], int8_linear(x, weight, 1)[1], rtol=1e-6)


def test_weights_are_quantized_as_the_oracle_does() -> None:
    weight = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    weight[4] = 0
    quantized = Int8Weight.from_float(weight)
    values, scales = quantize_rows(weight)
    np.testing.assert_array_equal(quantized.values, values)
    np.testing.assert_array_equal(quantized.scales, scales[:, 0])
