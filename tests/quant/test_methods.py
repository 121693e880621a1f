"""Each method's rounding against a quantizer in numpy float64 that goes one group at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.quant import int4
from jaxinfer.quant.int4 import Int4
from jaxinfer.quant.weight import Method, QuantizedWeight, method, rows
from pallas_kernels.common.compare import row_error

NAMES = ("int8", "int8_weight_only", "int4")
INT4 = [Int4(size, zero_point, rounding) for size in (32, 64, 128) for zero_point in (False, True) for rounding in ("nearest", "mse")]


def found(name: str, **options: Any) -> Method:
    made = method(name, **options)
    assert made is not None
    return made


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, a few outliers."""
    draws = np.random.default_rng(seed)
    values = draws.standard_normal(shape) * 10.0 ** draws.uniform(-3, 1, (*shape[:-1], 1))
    values[..., ::37] *= 4
    return values.astype(np.float32)


def groups_of(matrix: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (group for row in matrix.astype(np.float64) for group in row.reshape(-1, size))


def best_error(group: np.ndarray, is_symmetric: bool, widths: tuple[float, ...]) -> float:
    """The least squared error of a group on the grids of 16 float16-scaled steps that are tried."""
    errors = []
    for width in widths:
        if is_symmetric:
            extreme = group[np.argmax(np.abs(group))]
            scale = float(np.float16(-extreme / 8 * width))
            grid = scale * (np.arange(16) - 8)
        else:
            low, high = group.min(), group.max()
            scale = float(np.float16((high - low) / 15 * width))
            offset = float(np.float16((low + high) / 2 - (high - low) / 2 * width))
            grid = scale * np.arange(16) + offset
        errors.append(np.square(np.abs(group[:, None] - grid).min(axis=1)).sum())
    return min(errors)


@pytest.mark.parametrize("name", ["int8", "int8_weight_only"])
def test_int8_rounds_to_the_nearest_of_255_steps(name: str) -> None:
    matrix = weights(9, 64)
    matrix[3] = 0
    stored = found(name).from_float(matrix).dequantize()
    for row, got in zip(matrix.astype(np.float64), stored, strict=True):
        step = np.abs(row).max() / 127 or 1.0
        np.testing.assert_allclose(got, np.rint(row / step) * step, rtol=1e-6)


@pytest.mark.parametrize("chosen", INT4, ids=str)
def test_int4_takes_the_best_grid(chosen: Int4) -> None:
    matrix = weights(6, 256)
    stored = chosen.from_float(matrix).dequantize()
    widths = int4.WIDTHS if chosen.rounding == "mse" else (1.0,)
    for group, got in zip(groups_of(matrix, chosen.group_size), groups_of(stored, chosen.group_size), strict=True):
        assert np.square(got - group).sum() == pytest.approx(best_error(group, not chosen.zero_point, widths), rel=1e-3)


@pytest.mark.parametrize("zero_point", [False, True])
def test_mse_is_closer_and_smaller_groups_are_closer(zero_point: bool) -> None:
    matrix = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)

    def decibels(chosen: Int4) -> float:
        error = chosen.from_float(matrix).dequantize() - matrix
        return 10 * np.log10(np.square(matrix).sum() / np.square(error).sum())

    for size in (32, 64, 128):
        assert decibels(Int4(size, zero_point, "mse")) > decibels(Int4(size, zero_point, "nearest")) + 0.2
    by_size = [decibels(Int4(size, zero_point)) for size in (32, 64, 128)]
    assert by_size[0] > by_size[1] + 0.3 > by_size[2] + 0.6
    assert by_size[0] > 19


def test_an_offset_reproduces_weights_that_were_stored_so() -> None:
    """Sixteen evenly spaced values per group, both ends taken: what a Q4_1 file holds."""
    draws = np.random.default_rng(2)
    codes = draws.integers(0, 16, (20, 4, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    scales, offsets = (draws.uniform(low, 0.1, (20, 4, 1)).astype(np.float16).astype(np.float32) for low in (0.01, -0.1))
    matrix = (codes * scales + offsets).astype(np.float32).reshape(20, 128)
    np.testing.assert_allclose(Int4(32, True).from_float(matrix).dequantize(), matrix, atol=1e-8, rtol=2e-7)
    assert row_error(Int4(32, False).from_float(matrix).dequantize(), matrix) > 0.01, "a symmetric grid cannot"


@pytest.mark.parametrize("chosen", INT4, ids=str)
def test_groups_without_width(chosen: Int4) -> None:
    """All zeros stay zeros, and one value stays itself."""
    matrix = np.zeros((3, 128), np.float32)
    matrix[1] = 0.5
    matrix[2] = -3
    np.testing.assert_allclose(chosen.from_float(matrix).dequantize(), matrix, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(10, 128), (3, 10, 128)], ids=str)
def test_abstract_is_what_from_float_gives(name: str, shape: tuple[int, ...]) -> None:
    for zero_point in (False, True):
        chosen = found(name, group_size=64, zero_point=zero_point)
        value, struct = chosen.from_float(weights(*shape)), chosen.abstract(shape)
        assert isinstance(value, QuantizedWeight)
        assert jax.tree.structure(value) == jax.tree.structure(struct)
        assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(struct), strict=True))
        assert all(leaf.shape[len(shape) - 2] == 10 for leaf in jax.tree.leaves(value)), "rows lie on one axis of every array"


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_is_its_matrices(name: str) -> None:
    stack = weights(3, 10, 64)
    chosen = found(name)
    stored = chosen.from_float(stack)
    for expert, matrix in enumerate(stack):
        cut, alone = jax.tree.map(lambda leaf, expert=expert: leaf[expert], stored), chosen.from_float(matrix)
        assert jax.tree.structure(cut) == jax.tree.structure(alone)
        jax.tree.map(np.testing.assert_array_equal, cut, alone)
        np.testing.assert_array_equal(stored.dequantize()[expert], alone.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_products_and_rows(name: str) -> None:
    matrix, x = weights(33, 96), weights(5, 96, seed=1)
    stored = found(name).from_float(matrix)
    on_device = jax.tree.map(jnp.asarray, stored)
    floats = stored.dequantize().astype(np.float64)
    limit = 1e-3 if name == "int8" else 1e-6  # int8 rounds activations to 15 bits
    assert row_error(np.asarray(on_device.matmul(jnp.asarray(x))), x.astype(np.float64) @ floats.T) <= limit
    taken = np.asarray(rows(on_device, jnp.array([32, 0, 33, 1000, 7], jnp.int32)))
    np.testing.assert_allclose(taken, np.concatenate([floats[[32, 0]], np.zeros((2, 96)), floats[[7]]]), rtol=1e-6)


def test_what_is_accepted() -> None:
    eight, weight_only, four = found("int8"), found("int8_weight_only"), found("int4", group_size=64)
    assert eight.accepts((3, 17), 1)
    assert weight_only.accepts((3, 96), 1) and weight_only.accepts((3, 64), 2)
    assert not weight_only.accepts((3, 96), 2) and not weight_only.accepts((3, 80), 1)
    assert four.accepts((3, 128), 1) and four.accepts((3, 128), 2) and four.accepts((5, 3, 128), 2)
    assert four.accepts((3, 96), 1), "in groups of 32"
    assert not four.accepts((3, 80), 1) and not four.accepts((3, 192), 2)


def test_groups_are_halved_until_they_divide_the_inputs() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 576)).astype(np.float32)
    asked, halved = (found("int4", group_size=size).from_float(weight) for size in (128, 64))
    assert asked.matrix.group_size == 64
    np.testing.assert_array_equal(asked.dequantize(), halved.dequantize())
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found("int4", group_size=128).abstract((4, 576))) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), asked
    )


def test_names() -> None:
    assert method("none") is None
    assert found("int4", group_size=128, zero_point=True) == Int4(128, True, "mse")
    assert dataclasses.is_dataclass(found("int8_weight_only"))
    for name in ("int3", "packed", "weight"):
        with pytest.raises(ConfigError, match=name):
            method(name)
