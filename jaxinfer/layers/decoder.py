"""A decoder of equal blocks, and what may differ between families as fields of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jaxinfer import sharding
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.kv.cache import LayerKV
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.layers.attention import Attention, AttentionSpec, AttentionWeights, attention_weights
from jaxinfer.layers.embedding import Embedding
from jaxinfer.layers.mlp import MLP, Activation, MLPWeights, gated_weights
from jaxinfer.layers.norm import NormStyle, RMSNorm
from jaxinfer.layers.rope import Rope, rope_table, rotations
from jaxinfer.layers.stack import run_layers
from jaxinfer.layers.weights import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What differs between the layers of one model: how far a token sees (None: everything), and which rotation it takes."""

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The architecture. Defaults are Llama's.

    Attributes:
        size, hidden_size: of the residual stream and of the MLP.
        norms: RMSNorms before attention and MLP, after them (before the residual is added), or both.
        qk_norm, soft_cap: see `AttentionSpec`.
        attention_scale: None is head_dim ** -0.5.
        is_fused: q, k and v are one tensor of the checkpoint, gate and up another.
        residual_scale: what attention and MLP are multiplied by before they are added.
        logits_scale, logits_soft_cap: logits are multiplied by the one, then become cap * tanh(logits / cap).
        unused_tensors: how the names of tensors begin that the checkpoint may hold and the model does not read.
    """

    vocab_size: int
    size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    is_tied: bool
    layers: tuple[LayerKind, ...]
    ropes: tuple[Rope, ...]
    norm_style: NormStyle = "llama"
    norms: Literal["before", "after", "around"] = "before"
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_sinks: bool = False
    qk_norm: Literal["head", "all"] | None = None
    attention_scale: float | None = None
    soft_cap: float | None = None
    is_fused: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    unused_tensors: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """How many blocks there are."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each KV group: everything first, then the windows from small to large."""
        windows = {layer.window for layer in self.layers}
        return (*((None,) if None in windows else ()), *sorted(window for window in windows if window is not None))


def kv_groups(config: DecoderConfig, dtype_name: str) -> tuple[KVGroupSpec, ...]:
    """One group of layers for each window, with keys and values of `dtype_name`."""
    tensors = tuple(
        KVTensorSpec(name=name, num_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype_name) for name in ("keys", "values")
    )
    return tuple(
        KVGroupSpec(
            kind="full" if window is None else "window",
            layers=tuple(index for index, layer in enumerate(config.layers) if layer.window == window),
            window=window,
            tensors=tensors,
        )
        for window in config.windows
    )


class Block(nnx.Module):
    """x + attention(x), then x + mlp(x), each normalised before, after or both.

    Args:
        attention: called with x, rotation, kv and batch; gives what is added to x, and the cache.
        mlp: called with x and batch; gives what is added to x.
        norms: by place: before_attention, after_attention, before_mlp, after_mlp.
        residual_scale: what is added is multiplied by this.
    """

    def __init__(self, attention: nnx.Module, mlp: nnx.Module, norms: Mapping[str, nnx.Module], residual_scale: float = 1.0):
        self.attention: Any = attention
        self.mlp: Any = mlp
        self.norms = nnx.Dict(dict(norms))
        self.residual_scale = residual_scale

    def __call__(
        self, x: Float[Array, "T E"], rotation: Float32[Array, "R T D"] | None, kv: LayerKV, batch: ForwardBatch
    ) -> tuple[Float[Array, "T E"], LayerKV]:
        """One block; the cache is written and returned."""
        attended, kv = self.attention(self._norm("before_attention", x), rotation, kv, batch)
        x = x + self._scaled(self._norm("after_attention", attended))
        return x + self._scaled(self._norm("after_mlp", self.mlp(self._norm("before_mlp", x), batch))), kv

    def _norm(self, name: str, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return self.norms[name](x) if name in self.norms else x

    def _scaled(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


NORM_NAMES: dict[str, dict[str, str]] = {
    "before": {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    "after": {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    "around": {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
}
"""Hugging Face's names by where the norms stand."""

MakeLayer = Callable[[int], nnx.Module]
"""Makes the attention or the MLP of layer i."""


class Decoder(nnx.Module):
    """The whole model, in three pieces so that a step can be cut between layers.

    Args:
        config: the architecture.
        max_model_len: positions that the tables of rotations cover.
        make_mlp, make_attention: for families whose MLP or attention is another one.

    Raises:
        ConfigError: a split over the mesh that leaves a remainder.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mesh: Mesh,
        dtype: jnp.dtype,
        max_model_len: int,
        *,
        make_mlp: MakeLayer | None = None,
        make_attention: MakeLayer | None = None,
    ):
        check_split(config, mesh)
        norm = partial(RMSNorm, eps=config.norm_eps, dtype=dtype, style=config.norm_style)
        make_mlp = make_mlp or partial(decoder_mlp, config, mesh, dtype)
        make_attention = make_attention or partial(decoder_attention, config, mesh, dtype)
        embedding = partial(Embedding, vocab_size=config.vocab_size, size=config.size, mesh=mesh, dtype=dtype)
        self.embedding = embedding("model.embed_tokens.weight", scale=config.embedding_scale)
        self.layers = nnx.List(
            [
                Block(
                    make_attention(index),
                    make_mlp(index),
                    {at: norm(f"model.layers.{index}.{name}.weight", config.size) for at, name in NORM_NAMES[config.norms].items()},
                    config.residual_scale,
                )
                for index in range(config.num_layers)
            ]
        )
        self.norm = norm("model.norm.weight", config.size)
        if not config.is_tied:
            self.output = embedding("lm_head.weight")
        tables = np.stack([rope_table(rope, max_model_len) for rope in config.ropes])
        self.rope_tables: nnx.Variable[Any] = nnx.Variable(tables)
        self.is_tied = config.is_tied
        self.logits_scale = config.logits_scale
        self.logits_soft_cap = config.logits_soft_cap

    def embed(self, token_ids: Array, batch: ForwardBatch) -> tuple[Float[Array, "T E"], Float32[Array, "R T D"]]:
        """Token vectors, and each token's rotations."""
        return self.embedding(token_ids), rotations(self.rope_tables.get_value(), batch.positions)

    def run(
        self, x: Float[Array, "T E"], rotation: Array, kv: list[LayerKV], batch: ForwardBatch, start: int = 0, stop: int | None = None
    ) -> tuple[Float[Array, "T E"], list[LayerKV]]:
        """Layers start:stop over their caches."""
        return run_layers(list(self.layers)[start:stop], x, rotation, kv, batch)

    def head(self, x: Float[Array, "M E"]) -> Float32[Array, "M V"]:
        """Logits of the tokens given."""
        logits = (self.embedding if self.is_tied else self.output).logits(self.norm(x))
        if self.logits_scale != 1.0:
            logits = logits * self.logits_scale
        return logits if self.logits_soft_cap is None else jnp.tanh(logits / self.logits_soft_cap) * self.logits_soft_cap


def check_split(config: DecoderConfig, mesh: Mesh) -> None:
    """Refuse a model that the tensor axis does not divide.

    Raises:
        ConfigError: naming what does not divide.
    """
    sharding.kv_head_copies(config.num_kv_heads, mesh.shape[sharding.TENSOR])
    for what, count in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.hidden_size),
        ("vocab_size", config.vocab_size),
    ):
        sharding.check_divisible(what, count, mesh.shape[sharding.TENSOR])


def decoder_attention(config: DecoderConfig, mesh: Mesh, dtype: jnp.dtype, index: int) -> Attention:
    """The attention of layer `index`."""
    kind, name = config.layers[index], f"model.layers.{index}.self_attn"
    spec = AttentionSpec(
        size=config.size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5,
        group=config.windows.index(kind.window),
        rope=kind.rope,
        window=kind.window,
        soft_cap=config.soft_cap,
        qk_norm=config.qk_norm,
        norm_style=config.norm_style,
        norm_eps=config.norm_eps,
    )
    if config.is_fused:
        fused, ends = f"{name}.qkv_proj.weight", np.cumsum([config.num_heads, config.num_kv_heads, config.num_kv_heads]) * config.head_dim
        weights = AttentionWeights(qkv=_cuts(fused, [int(end) for end in ends]), out=f"{name}.o_proj.weight")
    else:
        weights = attention_weights(
            name,
            has_qkv_bias=config.has_qkv_bias,
            has_out_bias=config.has_out_bias,
            has_qk_norm=config.qk_norm is not None,
            has_sinks=config.has_sinks,
        )
    return Attention(spec, weights, mesh=mesh, dtype=dtype)


def decoder_mlp(config: DecoderConfig, mesh: Mesh, dtype: jnp.dtype, index: int) -> MLP:
    """The MLP of layer `index`."""
    name = f"model.layers.{index}.mlp"
    weights = gated_weights(name, has_bias=config.has_mlp_bias)
    if config.is_fused:
        up = _cuts(f"{name}.gate_up_proj.weight", [config.hidden_size, 2 * config.hidden_size])
        weights = MLPWeights(up=up, down=f"{name}.down_proj.weight")
    return MLP(weights, size=config.size, hidden_size=config.hidden_size, activation=config.activation, mesh=mesh, dtype=dtype)


def _cuts(name: str, ends: list[int]) -> tuple[Source, ...]:
    """The parts of a fused tensor, one after another on axis 0."""
    return tuple(Source(name, rows=(start, end, 1)) for start, end in zip([0, *ends], ends, strict=False))
