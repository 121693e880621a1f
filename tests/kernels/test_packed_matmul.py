"""The packed product beyond its specs: bits that do not depend on the other rows, refusals, and rows of every length."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.packed_matmul import PackedMatrix, dequantize, packed_matmul
from pallas_kernels.packed_matmul.specs import MAX_ROW_ERROR, SPECS, Spec, make_arguments
from tests.kernels import oracles

PLAIN = Spec(name="plain", num_rows=3, num_outputs=20, num_inputs=96, zero=8)


def native(x: np.ndarray, matrix: PackedMatrix) -> np.ndarray:
    return np.asarray(packed_matmul(jnp.asarray(x), jax.tree.map(jnp.asarray, matrix), implementation="native"))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_rows_have_the_same_bits_in_any_company(spec: Spec) -> None:
    """Rows of 70 alone and in slices of other lengths: each length takes another path through the blocks of the kernel."""
    arguments = make_arguments(dataclasses.replace(spec, num_rows=70))
    together = native(**arguments)
    for start, stop in ((0, 1), (69, 70), (3, 5), (7, 10), (20, 27), (31, 64)):
        np.testing.assert_array_equal(native(arguments["x"][start:stop], arguments["matrix"]), together[start:stop])


@pytest.mark.parametrize("num_inputs", [4096, 12288])
def test_long_rows(num_inputs: int) -> None:
    """Tiles are cut to fit into the cache, down to four rows; many rows of x take taller ones."""
    for num_rows in (1, 40):
        spec = Spec(name="long", num_rows=num_rows, num_outputs=70, num_inputs=num_inputs, has_offsets=True)
        arguments = make_arguments(spec)
        assert row_error(native(**arguments), oracles.packed_matmul(**arguments)) <= 2 * MAX_ROW_ERROR


def test_half_denormals_and_extremes_of_scales() -> None:
    """Scales of real files are often denormal halves, which some machines flush to zero in arithmetic."""
    arguments = make_arguments(PLAIN)
    halves = np.array([2.0**-24, 3 * 2.0**-24, 2.0**-15, 2.0**-14, 65504.0, -(2.0**-20)], np.float16)
    scales = np.resize(halves, arguments["matrix"].scales.shape)
    matrix = dataclasses.replace(arguments["matrix"], scales=scales)
    expected = oracles.packed_matmul(arguments["x"], matrix)
    assert row_error(native(arguments["x"], matrix).T, expected.T) <= MAX_ROW_ERROR, "each output has scales of another size"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["native", "xla", "reference"])
def test_activations_in_bfloat16(implementation: str, dtype: str) -> None:
    """The result is float32 and, but for `xla`, as exact as with float32 inputs of the same values."""
    arguments = make_arguments(PLAIN)
    x = jnp.asarray(arguments["x"], dtype)
    output = packed_matmul(x, jax.tree.map(jnp.asarray, arguments["matrix"]), implementation=implementation)
    assert output.dtype == jnp.float32
    expected = oracles.packed_matmul(np.asarray(x, np.float64), arguments["matrix"])
    limit = 1e-2 if (dtype, implementation) == ("bfloat16", "xla") else MAX_ROW_ERROR
    assert row_error(np.asarray(output), expected) <= limit


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_dequantize_on_the_host_and_on_the_device(spec: Spec) -> None:
    matrix = make_arguments(spec)["matrix"]
    expected = oracles.packed_matrix(matrix)
    on_host = dequantize(matrix, np)
    assert on_host.dtype == np.float32
    tolerance = 4e-7 * np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(on_host - expected) <= tolerance).all()
    assert (np.abs(np.asarray(jax.jit(dequantize)(jax.tree.map(jnp.asarray, matrix))) - expected) <= tolerance).all()


def test_refusals_of_the_native_kernel() -> None:
    x, matrix = make_arguments(PLAIN).values()
    eight = {"bits": 8, "zero": 0, "group_size": 0, "scales": np.ones((20, 1), np.float32)}
    for fields, reason in (
        ({**eight, "codes": np.ones((20, 96), np.int16)}, "codes must be"),
        ({"scales": matrix.scales.astype(np.float64)}, "scales must be"),
        ({"scales": np.ones((20, 2), np.float16), "group_size": 48}, "groups must be"),
    ):
        with pytest.raises(UnsupportedByKernel, match=reason):
            packed_matmul(x, dataclasses.replace(matrix, **fields), implementation="native")
    with pytest.raises(UnsupportedByKernel, match="multiple of 32"):
        short = dataclasses.replace(matrix, **eight, codes=np.ones((20, 50), np.int8))
        packed_matmul(x[:, :50], short, implementation="native")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"bits": 7}, "bits must be"),
        ({"codebook": (1.0,)}, "bits must be"),
        ({"group_size": 64}, "must divide"),
        ({"scales": np.ones((20, 2), np.float16)}, "scales must be"),
        ({"offsets": np.ones((19, 3), np.float16)}, "offsets must be"),
        ({"bits": 5, "high": np.zeros((20, 3, 2, 4), np.uint8)}, "high must be"),
        ({"super_scales": np.ones((20, 2), np.float16)}, "super_scales"),
        ({"codes": np.zeros((20, 4, 16), np.uint8)}, "x .* and the matrix"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(fields: dict[str, Any], reason: str) -> None:
    x, matrix = make_arguments(PLAIN).values()
    with pytest.raises(ValueError, match=reason):
        packed_matmul(x, dataclasses.replace(matrix, **fields))
