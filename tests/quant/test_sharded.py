"""Every kind of quantized weight in the layers that hold it, on two devices: rows of the matrix split, and its inputs."""

from __future__ import annotations

from collections.abc import Callable

import gguf.quants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from gguf.constants import GGMLQuantizationType as Kind

from jaxinfer import sharding
from jaxinfer.layers.embedding import Embedding
from jaxinfer.layers.linear import ColumnLinear, RowLinear
from jaxinfer.quant import fp8, gguf_blocks
from jaxinfer.quant.int4 import Int4
from jaxinfer.quant.int8 import Int8Weight
from jaxinfer.quant.int8_weight_only import Int8WeightOnly
from jaxinfer.quant.parts import Parts
from jaxinfer.quant.weight import QuantizedWeight
from pallas_kernels.common.compare import row_error
from tests.quant.test_gguf_blocks import random_blocks

NUM_OUTPUTS, NUM_INPUTS = 24, 512
MATRIX = np.random.default_rng(0).standard_normal((NUM_OUTPUTS, NUM_INPUTS)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((5, NUM_INPUTS)).astype(np.float32)


def gguf_weight(kind: Kind) -> Callable[[], QuantizedWeight]:
    return lambda: gguf_blocks.pack(kind, random_blocks(kind, NUM_OUTPUTS, largest=1e-2))


def float8_blocks() -> QuantizedWeight:
    scales = np.random.default_rng(2).uniform(0.5, 2, (1, NUM_INPUTS // 128))
    return fp8.pack(MATRIX.astype(ml_dtypes.float8_e4m3fn), scales, (128, 128))


def parts() -> QuantizedWeight:
    return Parts((Int4(32, True).from_float(MATRIX[:8]), MATRIX[8:12], Int8WeightOnly().from_float(MATRIX[12:])))


WEIGHTS: dict[str, Callable[[], QuantizedWeight]] = {
    "int8": lambda: Int8Weight.from_float(MATRIX),
    "int8_weight_only": lambda: Int8WeightOnly().from_float(MATRIX),
    "int4": lambda: Int4(64).from_float(MATRIX),
    "int4_zero_point": lambda: Int4(32, True).from_float(MATRIX),
    "q5_0": gguf_weight(Kind.Q5_0),
    "q4_k": gguf_weight(Kind.Q4_K),
    "q6_k": gguf_weight(Kind.Q6_K),
    "float8_blocks": float8_blocks,
    "parts": parts,
}


def place(layer: nnx.Module, weight: QuantizedWeight, axes: tuple[str | None, str | None]) -> None:
    mesh = layer.mesh
    layer.weight = nnx.Param(sharding.put(mesh, weight, weight.specs(sharding.spec(*axes))))


def limit(name: str) -> float:
    return 1e-3 if name == "int8" else 2e-6  # int8 rounds activations, on each device by themselves


@pytest.mark.parametrize("name", WEIGHTS)
def test_column_split(name: str) -> None:
    weight, mesh = WEIGHTS[name](), sharding.make_mesh(2)
    layer = ColumnLinear(("w",), (NUM_OUTPUTS,), NUM_INPUTS, axis="mlp", mesh=mesh, dtype=jnp.dtype("float32"))
    place(layer, weight, ("mlp", None))
    output = np.asarray(jax.jit(layer)(jnp.asarray(X)))
    floats = weight.dequantize().astype(np.float64)
    if name == "parts":  # each device holds its piece of every part
        pieces = [np.split(part, 2) for part in np.split(floats, [8, 12])]
        floats = np.concatenate([piece[shard] for shard in range(2) for piece in pieces])
    assert row_error(output, X @ floats.T) <= limit(name)
    assert row_error(np.roll(output, 1, axis=1), X @ floats.T) > 0.1


@pytest.mark.parametrize("name", WEIGHTS)
def test_row_split(name: str) -> None:
    weight, mesh = WEIGHTS[name](), sharding.make_mesh(2)
    layer = RowLinear("w", NUM_OUTPUTS, NUM_INPUTS, axis="mlp", mesh=mesh, dtype=jnp.dtype("float32"))
    place(layer, weight, (None, "mlp"))
    output = np.asarray(jax.jit(layer)(jnp.asarray(X)))
    assert row_error(output, X @ weight.dequantize().astype(np.float64).T) <= limit(name)


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "parts"])
def test_vocabulary_split(name: str) -> None:
    """Look-ups on both devices, and the product with the same table."""
    weight, mesh = WEIGHTS[name](), sharding.make_mesh(2)
    layer = Embedding("w", NUM_OUTPUTS, NUM_INPUTS, mesh=mesh, dtype=jnp.dtype("float32"))
    place(layer, weight, ("vocab", None))
    floats, ids = weight.dequantize(), np.array([0, 23, 11, 12, 5], np.int32)
    np.testing.assert_allclose(np.asarray(jax.jit(layer)(jnp.asarray(ids))), floats[ids], rtol=1e-6)
    assert row_error(np.asarray(jax.jit(layer.logits)(jnp.asarray(X))), X @ floats.astype(np.float64).T) <= limit(name)


def test_parts_look_up_rows() -> None:
    weight = jax.tree.map(jnp.asarray, parts())
    ids = np.array([0, 7, 8, 11, 12, 23, 24, 99], np.int32)
    expected = np.concatenate([weight.dequantize()[ids[:6]], np.zeros((2, NUM_INPUTS), np.float32)])
    np.testing.assert_allclose(np.asarray(weight.rows(jnp.asarray(ids))), expected, rtol=1e-6)


def test_stacks_are_split_like_their_matrices() -> None:
    """The experts' axis stays whole here, and goes where it is told to."""
    stack = Int4(32, True).from_float(np.stack([MATRIX, -MATRIX]))
    for axes in ((None, "mlp", None), (None, None, "mlp"), ("mlp", None, None)):
        placed = sharding.put(sharding.make_mesh(2), stack, stack.specs(sharding.spec(*axes)))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, placed), stack)
        shape = placed.matrix.codes.sharding.shard_shape(placed.matrix.codes.shape)
        assert shape[axes.index("mlp")] * 2 == placed.matrix.codes.shape[axes.index("mlp")]


def test_values_of_the_gguf_weights_are_finite() -> None:
    """What the tests above compare is no NaN on both sides."""
    for kind in (Kind.Q5_0, Kind.Q4_K, Kind.Q6_K):
        assert np.isfinite(gguf.quants.dequantize(random_blocks(kind, NUM_OUTPUTS, largest=1e-2), kind)).all()
