"""Llama (HF LlamaForCausalLM): pre-norm blocks, rotary grouped-query attention, SwiGLU; also SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jaxinfer import sharding
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.kv.cache import LayerKV
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.layers.attention import Attention
from jaxinfer.layers.embedding import Embedding
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import Rope, RopeTable, rotations
from jaxinfer.layers.stack import run_layers
from jaxinfer.models.config import ConfigReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The architecture, from config.json."""

    vocab_size: int
    size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    is_tied: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], file: str) -> Config:
        """Read config.json.

        Raises:
            CheckpointError: an attribute is missing or of the wrong type.
            UnsupportedModelError: an attribute asks for what is not implemented.
        """
        reader = ConfigReader(config, file)
        size, num_heads = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        reader.only("hidden_act", "silu")
        reader.only("attention_bias", False)
        reader.only("mlp_bias", False)
        reader.only("attention_dropout", 0.0, 0)
        reader.only("partial_rotary_factor", 1.0, 1)
        reader.only("rope_scaling", {"rope_type": "default"}, {"type": "default"})
        rope = reader.optional("rope_parameters", dict, {})
        if rope.get("rope_type", "default") != "default":
            reader.only("rope_parameters", {"rope_type": "default"})
        theta = reader.optional("rope_theta", float, float(rope.get("rope_theta", 10000.0)))
        result = cls(
            vocab_size=reader.positive("vocab_size"),
            size=size,
            hidden_size=reader.positive("intermediate_size"),
            num_layers=reader.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=reader.positive("num_key_value_heads", default=num_heads),
            head_dim=reader.positive("head_dim", default=max(1, size // num_heads)),
            max_positions=reader.positive("max_position_embeddings", default=2048),
            norm_eps=reader.optional("rms_norm_eps", float, 1e-6),
            rope_theta=theta,
            is_tied=reader.optional("tie_word_embeddings", bool, False),
        )
        reader.finish()
        return result


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, index: int, config: Config, mesh: Mesh, dtype: jnp.dtype):
        name = f"model.layers.{index}"
        self.attention_norm = RMSNorm(f"{name}.input_layernorm.weight", config.size, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(
            f"{name}.self_attn",
            size=config.size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            group=0,
            mesh=mesh,
            dtype=dtype,
        )
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm.weight", config.size, eps=config.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(f"{name}.mlp", size=config.size, hidden_size=config.hidden_size, mesh=mesh, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T E"], rotation: Float32[Array, "T D"], kv: LayerKV, batch: ForwardBatch
    ) -> tuple[Float[Array, "T E"], LayerKV]:
        """One block; the cache is written and returned."""
        attended, kv = self.attention(self.attention_norm(x), rotation, kv, batch)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), kv


class Model(nnx.Module):
    """The whole decoder, in three pieces so that a step can be cut between layers."""

    def __init__(self, config: Config, mesh: Mesh, dtype: jnp.dtype):
        tensor_parallel_size = mesh.shape[sharding.TENSOR]
        for what, count in (
            ("num_attention_heads", config.num_heads),
            ("num_key_value_heads", config.num_kv_heads),
            ("intermediate_size", config.hidden_size),
            ("vocab_size", config.vocab_size),
        ):
            sharding.check_divisible(what, count, tensor_parallel_size)
        self.embedding = Embedding("model.embed_tokens.weight", config.vocab_size, config.size, mesh=mesh, dtype=dtype)
        self.layers = nnx.List([Block(index, config, mesh, dtype) for index in range(config.num_layers)])
        self.norm = RMSNorm("model.norm.weight", config.size, eps=config.norm_eps, dtype=dtype)
        if not config.is_tied:
            self.output = Embedding("lm_head.weight", config.vocab_size, config.size, mesh=mesh, dtype=dtype)
        rope = Rope(config.rope_theta, config.head_dim, config.max_positions)
        self.rope_table: nnx.Variable[Any] = nnx.Variable(RopeTable.build(rope).values)
        self.is_tied = config.is_tied

    def embed(self, token_ids: Array, batch: ForwardBatch) -> tuple[Float[Array, "T E"], Float32[Array, "T D"]]:
        """Token vectors, and each token's rotation."""
        return self.embedding(token_ids), rotations(self.rope_table.get_value(), batch.positions)

    def run(
        self, x: Float[Array, "T E"], rotation: Array, kv: list[LayerKV], batch: ForwardBatch, start: int = 0, stop: int | None = None
    ) -> tuple[Float[Array, "T E"], list[LayerKV]]:
        """Layers start:stop over their caches."""
        return run_layers(list(self.layers)[start:stop], x, rotation, kv, batch)

    def head(self, x: Float[Array, "M E"]) -> Float32[Array, "M V"]:
        """Logits of the tokens given."""
        return (self.embedding if self.is_tied else self.output).logits(self.norm(x))


def kv_groups(config: Config, dtype: jnp.dtype) -> tuple[KVGroupSpec, ...]:
    """One group: every layer keeps keys and values of all tokens."""
    tensors = tuple(
        KVTensorSpec(name=name, num_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=str(jnp.dtype(dtype)))
        for name in ("keys", "values")
    )
    return (KVGroupSpec(kind="full", layers=tuple(range(config.num_layers)), tensors=tensors),)
