"""The grouped product of every implementation and spec against numpy float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.grouped_matmul import api, native, ragged, reference, specs, xla

# Not through the operation: on a CPU `ragged` refuses, being slow there, not wrong.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "native": native.grouped_matmul,
    "xla": xla.grouped_matmul,
    "ragged": ragged.ragged_product,
    "reference": reference.grouped_matmul,
}


def oracle(x: np.ndarray, weight: np.ndarray, tile_expert: np.ndarray) -> np.ndarray:
    """One tile at a time."""
    output = np.zeros((*x.shape[:2], weight.shape[1]))
    for tile, expert in enumerate(tile_expert):
        if expert < len(weight):
            output[tile] = x[tile].astype(np.float64) @ weight[expert].T.astype(np.float64)
    return output


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", specs.SPECS, ids=lambda spec: spec.name)
def test_implementation_equals_the_oracle(spec: specs.Spec, implementation: str) -> None:
    """A tile multiplied by its neighbour's expert is off by more than a half."""
    if implementation == "native" and spec.num_inputs % native.LANES:
        pytest.skip("refused, as the last test sees")
    arguments = specs.make_arguments(spec)
    expected = oracle(**arguments)
    output = np.asarray(jax.jit(IMPLEMENTATIONS[implementation])(**arguments))
    assert output.dtype == np.float32
    assert row_error(output, expected) <= specs.MAX_ROW_ERROR
    if sum(spec.tiles):
        neighbour = arguments | {"tile_expert": (arguments["tile_expert"] + 1) % (len(spec.tiles) + 1)}
        for broken in (np.zeros_like(output), np.roll(output, 1, axis=-1), oracle(**neighbour)):
            assert row_error(broken, expected) > 0.1, "the comparison would accept a broken kernel"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_is_summed_in_float32(implementation: str) -> None:
    """Products of bfloat16 numbers are exact in float32; sums kept in bfloat16 would be off by 1e-2."""
    arguments = {
        name: jnp.asarray(array, jnp.bfloat16) if array.dtype == np.float32 else jnp.asarray(array)
        for name, array in specs.make_arguments(specs.SPECS[-1]).items()
    }
    output = np.asarray(jax.jit(IMPLEMENTATIONS[implementation])(**arguments))
    rounded = {name: np.asarray(array, np.float64 if array.dtype == jnp.bfloat16 else None) for name, array in arguments.items()}
    assert row_error(output, oracle(**rounded)) <= specs.MAX_ROW_ERROR


@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_a_row_has_the_same_bits_in_any_company(implementation: str) -> None:
    """Its tile alone and as one of twelve; in a tile of eight rows, and of two."""
    run = jax.jit(IMPLEMENTATIONS[implementation])
    spec = specs.Spec(name="many", tiles=(3, 0, 5, 4), num_outputs=97, num_inputs=208)
    arguments = specs.make_arguments(spec)
    together = np.asarray(run(**arguments))
    for tile in (0, 4, 11):
        alone = arguments | {"x": arguments["x"][tile : tile + 1], "tile_expert": arguments["tile_expert"][tile : tile + 1]}
        np.testing.assert_array_equal(np.asarray(run(**alone))[0], together[tile])
        np.testing.assert_array_equal(np.asarray(run(**alone | {"x": alone["x"][:, 5:7]}))[0], together[tile, 5:7])


def test_what_does_not_fit_is_refused() -> None:
    """Shapes, the kind of the indices, and a product that would be slow here."""
    arguments = specs.make_arguments(specs.SPECS[0])
    with pytest.raises(ValueError, match=r"must be \[A U K\]"):
        api.grouped_matmul(**arguments | {"tile_expert": arguments["tile_expert"][1:]})
    with pytest.raises(ValueError, match="integers"):
        api.grouped_matmul(**arguments | {"tile_expert": arguments["tile_expert"].astype(np.float32)})
    with pytest.raises(UnsupportedByKernel, match=r"cpu.*every expert"):
        api.grouped_matmul(**arguments, implementation="ragged")
    assert api.OPERATION.choice(arguments, {})[0] == "native"
    odd = specs.make_arguments(next(spec for spec in specs.SPECS if spec.name == "odd_sizes"))
    name, refusals = api.OPERATION.choice(odd, {})
    assert name == "xla"
    assert "needs a Hopper GPU" in refusals[0]
    assert "multiple of 16, got 51" in refusals[1]
