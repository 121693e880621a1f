"""gpt_oss (HF GptOssForCausalLM, arXiv:2508.10925): sinks, a window in every other layer, biases, experts with a clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.layers import decoder
from jaxinfer.layers.decoder import Decoder
from jaxinfer.layers.moe import ClampedGating, ExpertSources, MoE, MoEConfig, experts_of
from jaxinfer.layers.routing import Router, TopKSoftmax
from jaxinfer.models.config import ConfigReader, stretched_positions

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of a config.json that says nothing of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(MoEConfig):
    """The architecture, from config.json."""

    gating: ClampedGating

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], file: str) -> Config:
        """Read config.json.

        Raises:
            CheckpointError: an attribute is missing or of the wrong type.
            UnsupportedModelError: an attribute asks for what is not implemented.
        """
        if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
            config = {**config, "rope_scaling": YARN}
        reader = ConfigReader(config, file)
        fields = reader.decoder_fields(norm_eps=1e-5, head_dim=64, max_positions=131_072)
        reader.only("hidden_act", "silu")
        reader.ignore("output_router_logits", "router_aux_loss_coef")  # for training
        reader.ignore("experts_per_token", "initial_context_length")  # what other attributes say as well
        rope = reader.rope(head_dim=fields["head_dim"], max_positions=fields["max_positions"], default_theta=150_000.0)
        num_layers, has_bias = reader.positive("num_hidden_layers"), reader.optional("attention_bias", bool, True)
        window = reader.positive("sliding_window", default=128)
        num_experts, num_chosen = reader.expert_counts("num_local_experts", default=128, default_chosen=4)
        result = cls(
            **fields | {"max_positions": stretched_positions(rope, fields["max_positions"])},
            layers=reader.layer_kinds(window, [index % 2 == 0 for index in range(num_layers)]),
            ropes=(rope,),
            norm_style="float32",
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_sinks=True,
            num_experts=num_experts,
            expert_size=fields["hidden_size"],
            routing=TopKSoftmax(num_chosen=num_chosen),
            gating=ClampedGating(alpha=reader.number("swiglu_alpha", 1.702), limit=reader.number("swiglu_limit", 7.0)),
        )
        reader.finish()
        return result


class Model(Decoder):
    """A decoder whose MLPs are experts with biases."""

    def __init__(self, config: Config, mesh: Mesh, dtype: jnp.dtype, max_model_len: int):
        super().__init__(config, mesh, dtype, max_model_len, make_mlp=partial(_experts, config, mesh, dtype))


def _experts(config: Config, mesh: Mesh, dtype: jnp.dtype, index: int) -> MoE:
    name = f"model.layers.{index}.mlp"
    sources = ExpertSources.interleaved(f"{name}.experts", config.num_experts, config.expert_size)
    router = Router(f"{name}.router.weight", config.size, config.num_experts, config.routing, bias=f"{name}.router.bias")
    return MoE(router, experts_of(config, sources, config.gating, mesh, dtype))


kv_groups = decoder.kv_groups
