"""Mixtures of experts: tokens sorted by expert into tiles, grouped products over the tiles that are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer import sharding
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.layers.decoder import DecoderConfig, decoder_mlp
from jaxinfer.layers.expert_tiles import HOPPER_TILE_ROWS, MAX_TILE_ROWS, pick_tile_rows, sort_into_tiles
from jaxinfer.layers.linear import weight_specs
from jaxinfer.layers.mlp import MLP, gated_weights
from jaxinfer.layers.routing import Router, Routing
from jaxinfer.layers.weights import Source, WeightSpec, param
from jaxinfer.quant import weight as quant
from pallas_kernels.common.mosaic import device

Gating = Callable[[Array, Array], Array]
"""(gate, up) -> hidden."""


def silu_gating(gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """SwiGLU, arXiv:2002.05202."""
    return jax.nn.silu(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedGating:
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up on both sides (HF GptOssExperts)."""

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Computed in the dtype of its operands."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(gate * self.alpha)


@dataclass(frozen=True, slots=True)
class ExpertSources:
    """Where the weights of the experts are, one entry per expert."""

    gate: tuple[Source, ...]
    up: tuple[Source, ...]
    down: tuple[Source, ...]
    gate_bias: tuple[Source, ...] = ()
    up_bias: tuple[Source, ...] = ()
    down_bias: tuple[Source, ...] = ()

    @classmethod
    def per_expert(
        cls, name: str, num_experts: int, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
    ) -> ExpertSources:
        """`{name}.{expert}.{gate}.weight` and so on, as most models are published."""

        def of(matrix: str) -> tuple[Source, ...]:
            return tuple(Source(f"{name}.{expert}.{matrix}.weight") for expert in range(num_experts))

        return cls(of(gate), of(up), of(down))

    @classmethod
    def interleaved(cls, name: str, num_experts: int, hidden_size: int) -> ExpertSources:
        """gpt_oss: `gate_up_proj` [X E 2F] with gate and up in turn, `down_proj` [X F E], and a bias of each."""
        gate_rows, up_rows = (0, 2 * hidden_size, 2), (1, 2 * hidden_size, 2)

        def of(tensor: str, rows: tuple[int, int, int] | None = None, is_transposed: bool = False) -> tuple[Source, ...]:
            return tuple(Source(f"{name}.{tensor}", rows, is_transposed, expert) for expert in range(num_experts))

        return cls(
            of("gate_up_proj", gate_rows, True),
            of("gate_up_proj", up_rows, True),
            of("down_proj", None, True),
            of("gate_up_proj_bias", gate_rows),
            of("gate_up_proj_bias", up_rows),
            of("down_proj_bias"),
        )


class Experts(nnx.Module):
    """The feed-forward experts, F of each on the tensor axis; one all-reduce."""

    def __init__(self, sources: ExpertSources, *, size: int, hidden_size: int, gating: Gating, mesh: Mesh, dtype: jnp.dtype):
        num_experts = len(sources.gate)

        def stacked(runs: tuple[tuple[Source, ...], ...], shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
            in_turn = tuple(source for expert in zip(*runs, strict=True) for source in expert)
            spec = WeightSpec(in_turn, (num_experts, *shape), (None, *axes), is_quantizable=len(shape) > 1, num_stacked=num_experts)
            return param(spec, dtype)

        self.gate_up = stacked((sources.gate, sources.up), (2 * hidden_size, size), ("mlp", None))
        self.down = stacked((sources.down,), (size, hidden_size), (None, "mlp"))
        self.has_bias = bool(sources.gate_bias)
        if self.has_bias:
            self.gate_up_bias = stacked((sources.gate_bias, sources.up_bias), (2 * hidden_size,), ("mlp",))
            self.down_bias = stacked((sources.down_bias,), (size,), (None,))
        self.num_experts = num_experts
        self.gating = gating
        self.mesh = mesh

    def __call__(self, x: Float[Array, "T E"], weights: Float32[Array, "T J"], experts: Int32[Array, "T J"]) -> Float32[Array, "T E"]:
        """The weighted sum of each token's experts; expert X adds nothing."""
        gate_up, down = self.gate_up.get_value(), self.down.get_value()
        biases = (self.gate_up_bias.get_value(), self.down_bias.get_value()) if self.has_bias else None
        everywhere = PartitionSpec()
        run = jax.shard_map(
            partial(_run_experts, gating=self.gating, num_experts=self.num_experts),
            mesh=self.mesh,
            in_specs=(
                everywhere,
                everywhere,
                everywhere,
                weight_specs(gate_up, sharding.spec(None, "mlp", None)),
                weight_specs(down, sharding.spec(None, None, "mlp")),
                (sharding.spec(None, "mlp"), everywhere) if self.has_bias else None,
            ),
            out_specs=everywhere,
            check_vma=False,  # as in ColumnLinear
        )
        return run(x, weights, experts, gate_up, down, biases)


def _run_experts(x, weights, experts, gate_up: Any, down: Any, biases, *, gating: Gating, num_experts: int) -> Float32[Array, "T E"]:
    max_rows = HOPPER_TILE_ROWS if device().is_hopper else MAX_TILE_ROWS
    tiles = sort_into_tiles(experts, num_experts, pick_tile_rows(experts.size, num_experts, max_rows))
    hidden = quant.grouped_matmul(x[tiles.token], gate_up, tiles.expert)
    if biases is not None:
        hidden = hidden + biases[0].astype(jnp.float32).at[tiles.expert].get(mode="clip")[:, None, :]
    gate, up = jnp.split(hidden, 2, axis=-1)
    result = quant.grouped_matmul(gating(gate, up).astype(x.dtype), down, tiles.expert)
    result = result.reshape(-1, x.shape[1])
    # The experts of a token in the order of its choice: a sum whose order another token cannot change.
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(experts.shape[1]):
        total = total + weights[:, choice, None] * result.at[tiles.place[:, choice]].get(mode="fill", fill_value=0.0)
    total = lax.psum(total, sharding.TENSOR)
    if biases is not None:
        down_bias = biases[1].astype(jnp.float32)
        for choice in range(experts.shape[1]):
            total = total + weights[:, choice, None] * down_bias.at[experts[:, choice]].get(mode="fill", fill_value=0.0)
    return total


class MoE(nnx.Module):
    """Routed experts, and beside them a shared one that every token goes through (arXiv:2401.06066) where there is one."""

    def __init__(self, router: Router, experts: Experts, shared: nnx.Module | None = None):
        self.router = router
        self.experts = experts
        if shared is not None:
            self.shared = shared
        self.has_shared = shared is not None

    def __call__(self, x: Float[Array, "T E"], batch: ForwardBatch) -> Float[Array, "T E"]:
        """Padding tokens go to no expert: they would read weights that no token of the batch needs."""
        weights, experts = self.router(x)
        is_token = jnp.arange(x.shape[0], dtype=jnp.int32) < batch.query_start_loc[-1]
        experts = jnp.where(is_token[:, None], experts, self.experts.num_experts).astype(jnp.int32)
        result = self.experts(x, weights, experts).astype(x.dtype)
        return result + self.shared(x) if self.has_shared else result


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig(DecoderConfig):
    """A decoder with experts in some of its layers.

    Attributes:
        expert_size: F of one expert.
        routing: which experts a token goes to.
        shared_size: F of the expert that every token goes through; 0 is none.
        dense_layers: which layers have an MLP of `hidden_size` instead.
        has_correction: the router has DeepSeek-V3's correction of scores.
    """

    num_experts: int
    expert_size: int
    routing: Routing
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    has_correction: bool = False


def decoder_moe(config: MoEConfig, mesh: Mesh, dtype: jnp.dtype, index: int) -> nnx.Module:
    """The experts of layer `index`, or its MLP, under the names that most models are published with.

    Raises:
        ConfigError: experts that the tensor axis does not divide.
    """
    if index in config.dense_layers:
        return decoder_mlp(config, mesh, dtype, index)
    name = f"model.layers.{index}.mlp"
    correction = f"{name}.gate.e_score_correction_bias" if config.has_correction else None
    router = Router(f"{name}.gate.weight", config.size, config.num_experts, config.routing, correction=correction)
    experts = experts_of(config, ExpertSources.per_expert(f"{name}.experts", config.num_experts), silu_gating, mesh, dtype)
    if not config.shared_size:
        return MoE(router, experts)
    shared = MLP(
        gated_weights(f"{name}.shared_experts"),
        size=config.size,
        hidden_size=config.shared_size,
        activation=config.activation,
        mesh=mesh,
        dtype=dtype,
    )
    return MoE(router, experts, shared)


def experts_of(config: MoEConfig, sources: ExpertSources, gating: Gating, mesh: Mesh, dtype: jnp.dtype) -> Experts:
    """A layer's experts, of the sizes in the configuration.

    Raises:
        ConfigError: experts that the tensor axis does not divide.
    """
    sharding.check_divisible("size of an expert", config.expert_size, mesh.shape[sharding.TENSOR])
    return Experts(sources, size=config.size, hidden_size=config.expert_size, gating=gating, mesh=mesh, dtype=dtype)
