"""Experts against numpy float64: sorting into tiles, biases, quantized weights, several devices, and bits in any batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import sharding
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.layers.expert_tiles import pick_tile_rows, sort_into_tiles
from jaxinfer.layers.moe import ClampedGating, Experts, ExpertSources, MoE, silu_gating
from jaxinfer.layers.routing import Router, TopKSoftmax
from jaxinfer.quant.int8 import Int8Weight

NUM_EXPERTS, SIZE, HIDDEN = 6, 24, 16


def random_choice(num_tokens: int, num_chosen: int, num_experts: int, seed: int = 0) -> np.ndarray:
    draws = np.random.default_rng(seed)
    return np.stack([draws.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)]).astype(np.int32)


CHOICES = {
    "random": random_choice(40, 2, 6),
    "one_token": random_choice(1, 3, 8),
    "all_on_one": np.full((20, 1), 4, np.int32),
    "all_on_the_last": np.full((17, 1), 5, np.int32),
    "nobody": np.full((5, 2), 6, np.int32),
    "some_go_nowhere": np.where(np.arange(30)[:, None] < 11, random_choice(30, 4, 6), 6),
    "many_experts": random_choice(9, 4, 64),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("tile_rows", [1, 8])
def test_every_pair_stands_in_a_tile_of_its_expert(name: str, tile_rows: int) -> None:
    experts = CHOICES[name]
    num_experts = 64 if name == "many_experts" else 8 if name == "one_token" else 6
    tiles = jax.tree.map(np.asarray, jax.jit(sort_into_tiles, static_argnums=(1, 2))(experts, num_experts, tile_rows))
    num_rows = tiles.token.size
    taken = set()
    for token, row in enumerate(experts):
        for expert, place in zip(row, tiles.place[token], strict=True):
            if expert == num_experts:
                assert place == num_rows
                continue
            assert tiles.expert[place // tile_rows] == expert
            assert tiles.token.ravel()[place] == token
            taken.add(int(place))
    assert len(taken) == (experts < num_experts).sum(), "no two pairs share a row"
    counts = np.bincount(experts.ravel(), minlength=num_experts + 1)[:num_experts]
    assert (tiles.expert < num_experts).sum() == (-(-counts // tile_rows)).sum(), "no tile is used that need not be"
    assert (np.diff(tiles.expert) >= 0).all()


def test_tile_rows_follow_the_batch() -> None:
    assert [pick_tile_rows(pairs, 8) for pairs in (2, 64, 65, 512, 100_000)] == [8, 8, 16, 64, 64]
    assert [pick_tile_rows(pairs, 8, 256) for pairs in (512, 2047, 2048, 4096, 100_000)] == [64, 64, 128, 256, 256]


class Oracle:
    """The experts' formula, a token at a time, in float64."""

    def __init__(self, seed: int, has_bias: bool, num_experts: int = NUM_EXPERTS, size: int = SIZE, hidden: int = HIDDEN):
        draws = np.random.default_rng(seed)
        self.gate_up = (draws.standard_normal((num_experts, 2 * hidden, size)) / np.sqrt(size)).astype(np.float32)
        self.down = (draws.standard_normal((num_experts, size, hidden)) / np.sqrt(hidden)).astype(np.float32)
        self.gate_up_bias = draws.standard_normal((num_experts, 2 * hidden)).astype(np.float32) * has_bias
        self.down_bias = draws.standard_normal((num_experts, size)).astype(np.float32) * has_bias

    def __call__(self, x: np.ndarray, weights: np.ndarray, experts: np.ndarray, clamp: tuple[float, float] | None) -> np.ndarray:
        output = np.zeros(x.shape)
        for token, row in enumerate(experts):
            for weight, expert in zip(weights[token], row, strict=True):
                if expert < len(self.down):
                    output[token] += float(weight) * self.expert(x[token].astype(np.float64), expert, clamp)
        return output

    def expert(self, x: np.ndarray, expert: int, clamp: tuple[float, float] | None) -> np.ndarray:
        gate, up = np.split(self.gate_up[expert].astype(np.float64) @ x + self.gate_up_bias[expert], 2)
        if clamp is None:
            hidden = gate / (1 + np.exp(-gate)) * up
        else:
            alpha, limit = clamp
            gate = np.minimum(gate, limit)
            hidden = (np.clip(up, -limit, limit) + 1) * gate / (1 + np.exp(-alpha * gate))
        return self.down[expert].astype(np.float64) @ hidden + self.down_bias[expert]


def shard_major(rows: np.ndarray, num_shards: int) -> np.ndarray:
    """Gate and up of axis 1 as the loader fuses them: each device's piece of both in turn."""
    gate, up = np.split(rows, 2, axis=1)
    pieces = zip(np.split(gate, num_shards, axis=1), np.split(up, num_shards, axis=1), strict=True)
    return np.concatenate([part for pair in pieces for part in pair], axis=1)


def build(oracle: Oracle, num_shards: int, clamp: tuple[float, float] | None, has_bias: bool, quantize: bool = False) -> Experts:
    """The layer with the oracle's weights."""
    mesh = sharding.make_mesh(num_shards)
    num_experts, size, hidden = oracle.down.shape
    sources = ExpertSources.interleaved("x", num_experts, hidden) if has_bias else ExpertSources.per_expert("x", num_experts)
    gating = silu_gating if clamp is None else ClampedGating(*clamp)
    layer = Experts(sources, size=size, hidden_size=hidden, gating=gating, mesh=mesh, dtype=jnp.dtype("float32"))
    values: dict[str, tuple[Any, Any]] = {
        "gate_up": (shard_major(oracle.gate_up, num_shards), sharding.spec(None, "mlp", None)),
        "down": (oracle.down, sharding.spec(None, None, "mlp")),
    }
    if quantize:
        for name, (array, spec) in list(values.items()):
            matrices = [Int8Weight.from_float(matrix) for matrix in array]
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *matrices)
            values[name] = (stacked, stacked.specs(spec))
    if has_bias:
        values["gate_up_bias"] = (shard_major(oracle.gate_up_bias, num_shards), sharding.spec(None, "mlp"))
        values["down_bias"] = (oracle.down_bias, sharding.spec())
    for name, (array, spec) in values.items():
        setattr(layer, name, nnx.Param(sharding.put(mesh, array, spec)))
    return layer


def run(layer: Experts, x: np.ndarray, weights: np.ndarray, experts: np.ndarray) -> np.ndarray:
    graph, state = nnx.split(layer)
    return np.asarray(jax.jit(lambda state, *arrays: nnx.merge(graph, state)(*arrays))(state, x, weights, experts))


def arguments(num_tokens: int, num_chosen: int = 3, num_experts: int = NUM_EXPERTS, size: int = SIZE) -> tuple[np.ndarray, ...]:
    draws = np.random.default_rng(5)
    x = (3 * draws.standard_normal((num_tokens, size))).astype(np.float32)
    weights = draws.uniform(0.1, 1.0, (num_tokens, num_chosen)).astype(np.float32)
    return x, weights, random_choice(num_tokens, num_chosen, num_experts)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("clamp", [None, (1.702, 2.0)], ids=["silu", "clamped_with_biases"])
def test_experts_equal_the_oracle(clamp: tuple[float, float] | None, num_shards: int) -> None:
    """The limit of 2 clamps many of the gates; F is split over the devices."""
    oracle = Oracle(0, clamp is not None)
    x, weights, experts = arguments(30)
    experts[20:] = NUM_EXPERTS  # padding
    output = run(build(oracle, num_shards, clamp, clamp is not None), x, weights, experts)
    expected = oracle(x, weights, experts, clamp)
    np.testing.assert_allclose(output, expected, atol=1e-5 * np.abs(expected).max())
    assert not output[20:].any()
    if clamp is not None:
        assert np.abs(oracle(x, weights, experts, (1.702, 7.0)) - expected).max() > 0.1, "the clamp must matter"


@pytest.mark.parametrize("num_shards", [1, 2])
def test_quantized_experts_are_near(num_shards: int) -> None:
    """Int8, one expert's parts at a time: far nearer than a wrong expert's would be."""
    oracle = Oracle(0, False)
    x, weights, experts = arguments(30)
    output = run(build(oracle, num_shards, None, False, quantize=True), x, weights, experts)
    expected = oracle(x, weights, experts, None)
    error = np.linalg.norm(output - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert 1e-5 < np.median(error) < 0.02


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    """64 tokens together, with tiles of 16 rows, and the same tokens alone, with tiles of 8."""
    oracle = Oracle(0, False, num_experts=8, size=64, hidden=48)
    layer = build(oracle, 1, None, False)
    x, weights, experts = arguments(64, 2, 8, 64)
    assert pick_tile_rows(128, 8) == 16
    together = run(layer, x, weights, experts)
    for token in (0, 1, 31, 63):
        alone = run(layer, x[token : token + 1], weights[token : token + 1], experts[token : token + 1])
        np.testing.assert_array_equal(alone[0], together[token])


def test_padding_goes_to_no_expert() -> None:
    """Of eight tokens three are real: the others have the shared expert alone, and the tiles are those of three tokens."""

    class Shared(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * x

    oracle = Oracle(0, False)
    x = np.random.default_rng(3).standard_normal((8, SIZE)).astype(np.float32)
    scores = np.random.default_rng(4).standard_normal((NUM_EXPERTS, SIZE)).astype(np.float32)
    router = Router("router.weight", SIZE, NUM_EXPERTS, TopKSoftmax(num_chosen=2))
    router.weight = nnx.Param(jnp.asarray(scores))
    layer = MoE(router, build(oracle, 1, None, False), Shared())
    nothing = np.zeros(1, np.int32)
    batch = ForwardBatch(
        **{field.name: nothing for field in dataclasses.fields(ForwardBatch)} | {"query_start_loc": np.array([0, 1, 3, 3])}
    )
    output = np.asarray(layer(jnp.asarray(x), batch))
    logits = x.astype(np.float64) @ scores.T.astype(np.float64)
    experts = np.argsort(-logits, axis=1)[:, :2]
    powers = np.exp(np.take_along_axis(logits, experts, axis=1))
    expected = oracle(x, powers / powers.sum(axis=1, keepdims=True), experts, None)
    np.testing.assert_allclose(output[:3], expected[:3] + 2 * x[:3], atol=1e-5)
    np.testing.assert_array_equal(output[3:], 2 * x[3:])
