"""Sources of a checkpoint -> parameters: parts of tensors, fused shard-major, stacked experts, kept quantized or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import sharding
from jaxinfer.checkpoints.load import Storage, declare_parameters, load_parameters
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor, PackedTensor
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.layers.weights import Source, WeightSpec, param
from jaxinfer.quant.int8 import Int8Weight
from jaxinfer.quant.parts import Parts
from jaxinfer.quant.weight import matmul, method

DRAWS = np.random.default_rng(0)


class OneParam(nnx.Module):
    def __init__(self, spec: WeightSpec):
        self.weight = param(spec, jnp.float32)


def plain(array: np.ndarray) -> LazyTensor:
    return LazyTensor(array.shape, array.dtype.name, lambda: array)


def stored_int8(array: np.ndarray) -> LazyTensor:
    """A tensor that a checkpoint holds as int8 and scales."""
    return LazyTensor(
        array.shape, "float32", lambda: array, PackedTensor(Int8Weight.abstract(array.shape), lambda: Int8Weight.from_float(array))
    )


def checkpoint(tensors: Mapping[str, LazyTensor]) -> Checkpoint:
    return Checkpoint(name="x", path=Path("x"), config={}, tensors=tensors, generation_config={}, tokenizer_source=lambda: pytest.fail())


def load(spec: WeightSpec, tensors: Mapping[str, LazyTensor], storage: Storage | None = None, num_devices: int = 1) -> Any:
    mesh, model = sharding.make_mesh(num_devices), OneParam(spec)
    slots = declare_parameters(model, mesh, checkpoint(tensors), storage or Storage())
    declared = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), model.weight.get_value())
    load_parameters(slots, checkpoint(tensors), mesh)
    value = model.weight.get_value()
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), value) == declared, "not what was compiled for"
    return value


def draw(*shape: int) -> np.ndarray:
    return DRAWS.standard_normal(shape).astype(np.float32)


def test_parts_of_tensors_are_fused_shard_major() -> None:
    """Two devices: each has its half of every source. Rows with a step, and a transposed tensor, are cut first."""
    both, transposed = draw(8, 3), draw(3, 4)
    sources = (Source("both", rows=(0, 8, 2)), Source("both", rows=(1, 8, 2)), Source("t", is_transposed=True))
    spec = WeightSpec(sources, (12, 3), ("heads", None))
    value = load(spec, {"both": plain(both), "t": plain(transposed)}, num_devices=2)
    even, odd, other = both[0::2], both[1::2], transposed.T
    halves = [np.concatenate([part[2 * i : 2 * i + 2] for part in (even, odd, other)]) for i in range(2)]
    np.testing.assert_array_equal(np.asarray(value), np.concatenate(halves))
    for shard, half in zip(value.addressable_shards, halves, strict=True):
        np.testing.assert_array_equal(np.asarray(shard.data), half)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_experts_are_stacked(is_quantized: bool) -> None:
    """From one tensor per expert, and from one tensor that stacks them; each is quantized for itself."""
    gates, up = [draw(4, 6) for _ in range(3)], draw(3, 6, 4)
    sources: list[Source] = []
    for expert in range(3):
        sources += [Source(f"gate{expert}"), Source("up", expert=expert, is_transposed=True)]
    spec = WeightSpec(tuple(sources), (3, 8, 6), (None, "mlp", None), is_quantizable=True, num_stacked=3)
    tensors = {f"gate{expert}": plain(gate) for expert, gate in enumerate(gates)} | {"up": plain(up)}
    expected = np.stack([np.concatenate([gates[expert], up[expert].T]) for expert in range(3)])
    value = load(spec, tensors, Storage(method=method("int8")) if is_quantized else None)
    if not is_quantized:
        np.testing.assert_array_equal(np.asarray(value), expected)
        return
    assert value.values.shape == (3, 8, 6) and value.scales.shape == (3, 8)
    np.testing.assert_allclose(np.asarray(value.values) * np.asarray(value.scales)[:, :, None], expected, atol=np.abs(expected).max() / 250)


def test_a_stored_quantization_is_kept_or_undone() -> None:
    q, k = draw(4, 6), draw(2, 6)
    spec = WeightSpec(("q", "k"), (6, 6), ("heads", None), is_quantizable=True)
    tensors = {"q": stored_int8(q), "k": stored_int8(k)}
    kept = load(spec, tensors, Storage(keeps_packed=True), num_devices=2)
    assert isinstance(kept, Int8Weight)
    np.testing.assert_array_equal(np.asarray(kept.scales)[:3], Int8Weight.from_float(np.concatenate([q[:2], k[:1]])).scales)
    floats = load(spec, tensors)
    np.testing.assert_array_equal(np.asarray(floats), np.concatenate([q, k]))
    vocabulary = WeightSpec(("q",), (4, 6), ("vocab", None), is_quantizable=True)
    assert isinstance(load(vocabulary, {"q": tensors["q"]}, Storage(keeps_packed=True, vocabulary=Storage())), jax.Array)


def test_pieces_of_different_types_stay_parts() -> None:
    q, k = draw(4, 6), draw(2, 6)
    spec = WeightSpec(("q", "k"), (6, 6), ("heads", None), is_quantizable=True)
    value = load(spec, {"q": stored_int8(q), "k": plain(k)}, Storage(keeps_packed=True))
    assert isinstance(value, Parts)
    x = draw(5, 6)
    np.testing.assert_allclose(np.asarray(matmul(jnp.asarray(x), value)), x @ np.concatenate([q, k]).T, atol=0.1)


def test_what_does_not_fit_is_named() -> None:
    spec = WeightSpec(("q",), (4, 6), (None, None))
    for tensors, error, words in (
        ({}, CheckpointError, "q: .*missing|missing.*q"),
        ({"q": plain(draw(4, 5))}, CheckpointError, r"\[4, 5\] where config.json asks for \[4, 6\]"),
        ({"q": plain(draw(3, 6))}, CheckpointError, "3 rows"),
        ({"q": plain(draw(4, 6)), "q_bias": plain(draw(4))}, UnsupportedModelError, "q_bias"),
    ):
        with pytest.raises(error, match=words):
            load(spec, tensors)
    for source in (Source("q", rows=(2, 6, 1)), Source("q", expert=0), Source("q", is_transposed=True)):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(WeightSpec((source,), (4, 6), (None, None)), {"q": plain(draw(4, 6))})
    assert load(spec, {"q": plain(draw(4, 6)), "model.rotary_emb.inv_freq": plain(draw(3))}).shape == (4, 6)


def test_biases_that_the_model_has_not_must_be_zeros() -> None:
    """As GPTQ's tools write them for every matrix."""
    spec = WeightSpec(("q.weight",), (4, 6), (None, None))
    matrix, zeros = {"q.weight": plain(draw(4, 6))}, np.zeros(4, np.float16)
    assert load(spec, matrix | {"q.bias": plain(zeros)}).shape == (4, 6)
    for others in ({"q.bias": plain(draw(4))}, {"q.bias": plain(np.zeros(5))}, {"k.bias": plain(zeros)}, {"q.weight.bias": plain(zeros)}):
        with pytest.raises(UnsupportedModelError, match=next(iter(others))):
            load(spec, matrix | others)
