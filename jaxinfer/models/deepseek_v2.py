"""DeepSeek-V2 (HF DeepseekV2ForCausalLM, arXiv:2405.04434): latent attention, shared and routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.layers import latent_decoder
from jaxinfer.layers.decoder import LayerKind
from jaxinfer.layers.latent_decoder import LatentConfig, LatentDecoder
from jaxinfer.layers.routing import SoftmaxTopK
from jaxinfer.models.config import ConfigReader, stretched_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(LatentConfig):
    """The architecture, from config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], file: str) -> Config:
        """Read config.json.

        Raises:
            CheckpointError: an attribute is missing or of the wrong type.
            UnsupportedModelError: an attribute asks for what is not implemented.
        """
        reader = ConfigReader(config, file)
        fields = reader.decoder_fields()
        for name, *allowed in (("hidden_act", "silu"), ("scoring_func", "softmax"), ("norm_topk_prob", False), ("mlp_bias", False)):
            reader.only(name, *allowed)
        reader.ignore("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef")  # for training
        reader.ignore("qk_head_dim")  # the sum of two others
        rope_dim = reader.positive("qk_rope_head_dim", default=64)
        rope = reader.rope(head_dim=rope_dim, max_positions=fields["max_positions"])
        num_experts, num_chosen = reader.expert_counts("n_routed_experts", default=64)
        expert_size, num_layers = reader.positive("moe_intermediate_size", default=1407), reader.positive("num_hidden_layers")
        groups = reader.expert_groups(num_experts, num_chosen, 1)
        reader.only("topk_method", "greedy", "group_limited_greedy")
        if reader.optional("topk_method", str, "greedy") == "greedy":
            groups = (1, 1)
        result = cls(
            **fields | {"max_positions": stretched_positions(rope, fields["max_positions"]), "head_dim": rope_dim},
            layers=(LayerKind(),) * num_layers,
            ropes=(rope,),
            latent=reader.latent(fields, rope, is_interleaved=True),
            num_experts=num_experts,
            expert_size=expert_size,
            shared_size=expert_size * reader.positive("n_shared_experts", default=2),
            routing=SoftmaxTopK(
                num_chosen=num_chosen,
                scaling=reader.number("routed_scaling_factor", 1.0),
                num_groups=groups[0],
                num_chosen_groups=groups[1],
            ),
            dense_layers=reader.dense_layers(num_layers, default_first=0),
        )
        reader.finish()
        return result


Model = LatentDecoder
kv_groups = latent_decoder.kv_groups
