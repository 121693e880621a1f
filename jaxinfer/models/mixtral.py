"""Mixtral (HF MixtralForCausalLM, arXiv:2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.layers import decoder
from jaxinfer.layers.decoder import Decoder, LayerKind
from jaxinfer.layers.moe import ExpertSources, MoE, MoEConfig, experts_of, silu_gating
from jaxinfer.layers.routing import Router, SoftmaxTopK
from jaxinfer.models.config import ConfigReader, stretched_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(MoEConfig):
    """The architecture, from config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], file: str) -> Config:
        """Read config.json.

        Raises:
            CheckpointError: an attribute is missing or of the wrong type.
            UnsupportedModelError: an attribute asks for what is not implemented.
        """
        reader = ConfigReader(config, file)
        fields = reader.decoder_fields(norm_eps=1e-5, max_positions=4096 * 32)
        reader.only("hidden_act", "silu")
        reader.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # for training
        rope = reader.rope(head_dim=fields["head_dim"], max_positions=fields["max_positions"], default_theta=1_000_000.0)
        window = reader.positive("sliding_window") if config.get("sliding_window") is not None else None
        num_experts, num_chosen = reader.expert_counts("num_local_experts", default=8, default_chosen=2)
        result = cls(
            **fields | {"max_positions": stretched_positions(rope, fields["max_positions"])},
            layers=(LayerKind(window=window),) * reader.positive("num_hidden_layers"),
            ropes=(rope,),
            num_experts=num_experts,
            expert_size=fields["hidden_size"],
            routing=SoftmaxTopK(num_chosen=num_chosen, is_renormalized=True),
        )
        reader.finish()
        return result


class Model(Decoder):
    """A decoder whose MLPs are experts."""

    def __init__(self, config: Config, mesh: Mesh, dtype: jnp.dtype, max_model_len: int):
        super().__init__(config, mesh, dtype, max_model_len, make_mlp=partial(_experts, config, mesh, dtype))


def _experts(config: Config, mesh: Mesh, dtype: jnp.dtype, index: int) -> MoE:
    name = f"model.layers.{index}.block_sparse_moe"
    sources = ExpertSources.per_expert(f"{name}.experts", config.num_experts, gate="w1", up="w3", down="w2")
    router = Router(f"{name}.gate.weight", config.size, config.num_experts, config.routing)
    return MoE(router, experts_of(config, sources, silu_gating, mesh, dtype))


kv_groups = decoder.kv_groups
