"""GPT-2 (HF GPT2LMHeadModel): LayerNorm, learned positions, an MLP without gate, fused and transposed weights, tied head."""

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
from jaxinfer.layers.attention import Attention, AttentionSpec, AttentionWeights
from jaxinfer.layers.decoder import Block
from jaxinfer.layers.embedding import Embedding
from jaxinfer.layers.mlp import MLP, Activation, MLPWeights
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.stack import run_layers
from jaxinfer.layers.weights import Source, WeightSpec, param
from jaxinfer.models.config import ConfigReader

HEAD_ATTRIBUTES = ("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj")
"""Of heads that this model does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The architecture, from config.json."""

    vocab_size: int
    size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    norm_eps: float
    activation: Activation
    is_scaled_by_layer: bool
    """Scores of layer i are divided by i + 1."""
    unused_tensors: tuple[str, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], file: str) -> Config:
        """Read config.json.

        Raises:
            CheckpointError: an attribute is missing or of the wrong type.
            UnsupportedModelError: an attribute asks for what is not implemented.
        """
        reader = ConfigReader(config, file)
        size, num_heads = reader.positive("n_embd"), reader.positive("n_head")
        if size % num_heads:
            raise reader.fail("n_head", f"must divide n_embd ({size}), got {num_heads}")
        reader.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
        reader.only("scale_attn_weights", True)
        reader.only("add_cross_attention", False)
        reader.only("tie_word_embeddings", True)
        # Of two ways to the same scores in float32, this asks for the more exact one, which is the only one here.
        reader.ignore("reorder_and_upcast_attn", "n_ctx", *HEAD_ATTRIBUTES)
        reader.ignore("n_special", "predict_special_tokens", "output_past")  # stand in the files of medium to XL; never read
        result = cls(
            vocab_size=reader.positive("vocab_size"),
            size=size,
            hidden_size=reader.positive("n_inner", default=4 * size),
            num_layers=reader.positive("n_layer"),
            num_heads=num_heads,
            max_positions=reader.positive("n_positions", default=1024),
            norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            activation="gelu_tanh",
            is_scaled_by_layer=reader.optional("scale_attn_by_inverse_layer_idx", bool, False),
        )
        reader.finish()
        return result


class Model(nnx.Module):
    """The whole decoder, in three pieces so that a step can be cut between layers."""

    def __init__(self, config: Config, mesh: Mesh, dtype: jnp.dtype, max_model_len: int):
        for what, count in (("n_head", config.num_heads), ("n_inner", config.hidden_size), ("vocab_size", config.vocab_size)):
            sharding.check_divisible(what, count, mesh.shape[sharding.TENSOR])
        self.embedding = Embedding("transformer.wte.weight", config.vocab_size, config.size, mesh=mesh, dtype=dtype)
        self.positions = param(WeightSpec(("transformer.wpe.weight",), (config.max_positions, config.size), (None, None)), dtype)
        self.layers = nnx.List([_block(config, mesh, dtype, index) for index in range(config.num_layers)])
        self.norm = LayerNorm("transformer.ln_f", config.size, eps=config.norm_eps, dtype=dtype)

    def embed(self, token_ids: Array, batch: ForwardBatch) -> tuple[Float[Array, "T E"], None]:
        """Token and position vectors; there is no rotation."""
        return self.embedding(token_ids) + self.positions.get_value().at[batch.positions].get(mode="clip"), None

    def run(
        self, x: Float[Array, "T E"], rotation: None, kv: list[LayerKV], batch: ForwardBatch, start: int = 0, stop: int | None = None
    ) -> tuple[Float[Array, "T E"], list[LayerKV]]:
        """Layers start:stop over their caches."""
        return run_layers(list(self.layers)[start:stop], x, rotation, kv, batch)

    def head(self, x: Float[Array, "M E"]) -> Float32[Array, "M V"]:
        """Logits of the tokens given."""
        return self.embedding.logits(self.norm(x))


def _block(config: Config, mesh: Mesh, dtype: jnp.dtype, index: int) -> Block:
    name, head_dim = f"transformer.h.{index}", config.size // config.num_heads
    spec = AttentionSpec(
        size=config.size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 / (index + 1 if config.is_scaled_by_layer else 1),
        rope=None,
    )
    thirds = [(part * config.size, (part + 1) * config.size, 1) for part in range(3)]
    attention = AttentionWeights(
        qkv=tuple(Source(f"{name}.attn.c_attn.weight", rows=rows, is_transposed=True) for rows in thirds),
        qkv_bias=tuple(Source(f"{name}.attn.c_attn.bias", rows=rows) for rows in thirds),
        out=Source(f"{name}.attn.c_proj.weight", is_transposed=True),
        out_bias=f"{name}.attn.c_proj.bias",
    )
    mlp = MLPWeights(
        up=(Source(f"{name}.mlp.c_fc.weight", is_transposed=True),),
        up_bias=(f"{name}.mlp.c_fc.bias",),
        down=Source(f"{name}.mlp.c_proj.weight", is_transposed=True),
        down_bias=f"{name}.mlp.c_proj.bias",
    )
    norms = {
        at: LayerNorm(f"{name}.{norm}", config.size, eps=config.norm_eps, dtype=dtype)
        for at, norm in (("before_attention", "ln_1"), ("before_mlp", "ln_2"))
    }
    return Block(
        Attention(spec, attention, mesh=mesh, dtype=dtype),
        MLP(mlp, size=config.size, hidden_size=config.hidden_size, activation=config.activation, mesh=mesh, dtype=dtype),
        norms,
    )


def kv_groups(config: Config, dtype_name: str) -> tuple[KVGroupSpec, ...]:
    """One group: every layer keeps keys and values of all tokens."""
    tensors = tuple(
        KVTensorSpec(name=name, num_heads=config.num_heads, head_dim=config.size // config.num_heads, dtype=dtype_name)
        for name in ("keys", "values")
    )
    return (KVGroupSpec(kind="full", layers=tuple(range(config.num_layers)), tensors=tensors),)
