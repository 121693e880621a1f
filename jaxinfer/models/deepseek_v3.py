"""DeepSeek-V3 and R1 (HF DeepseekV3ForCausalLM, arXiv:2412.19437): V2 with sigmoid routing that a correction balances.

The layers after the last one, which predict several tokens at once, are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.layers import latent_decoder
from jaxinfer.layers.decoder import LayerKind
from jaxinfer.layers.latent_attention import LatentSpec, latent_scale
from jaxinfer.layers.latent_decoder import LatentConfig, LatentDecoder
from jaxinfer.layers.rope import Rope
from jaxinfer.layers.routing import SigmoidTopK
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
        fields = reader.decoder_fields(max_positions=4096)
        for name, *allowed in (("hidden_act", "silu"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("mlp_bias", False)):
            reader.only(name, *allowed)
        reader.ignore("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef")  # for training
        reader.ignore("qk_head_dim")  # the sum of two others
        rope_dim = reader.positive("qk_rope_head_dim", default=64)
        rope = reader.rope(head_dim=rope_dim, max_positions=fields["max_positions"])
        num_experts, num_chosen = reader.expert_counts("n_routed_experts", default=256, default_chosen=8)
        expert_size, num_layers = reader.positive("moe_intermediate_size", default=2048), reader.positive("num_hidden_layers")
        num_groups, num_chosen_groups = reader.expert_groups(num_experts, num_chosen, 2)
        num_more = reader.optional("num_nextn_predict_layers", int, 0)
        if not 0 <= num_more <= num_layers:
            raise reader.fail("num_nextn_predict_layers", f"must be from 0 to num_hidden_layers ({num_layers}), got {num_more}")
        result = cls(
            **fields | {"max_positions": stretched_positions(rope, fields["max_positions"]), "head_dim": rope_dim},
            layers=(LayerKind(),) * num_layers,
            ropes=(rope,),
            latent=_latent(reader, config, fields, rope),
            num_experts=num_experts,
            expert_size=expert_size,
            shared_size=expert_size * reader.positive("n_shared_experts", default=1),
            routing=SigmoidTopK(
                num_chosen=num_chosen,
                is_renormalized=reader.optional("norm_topk_prob", bool, True),
                scaling=reader.number("routed_scaling_factor", 2.5),
                num_groups=num_groups,
                num_chosen_groups=num_chosen_groups,
            ),
            dense_layers=reader.dense_layers(num_layers, default_first=3),
            has_correction=True,
            unused_tensors=tuple(f"model.layers.{num_layers + index}." for index in range(num_more)),
        )
        reader.finish()
        return result


def _latent(reader: ConfigReader, config: Mapping[str, Any], fields: Mapping[str, Any], rope: Rope) -> LatentSpec:
    plain_dim = reader.positive("qk_nope_head_dim", default=128)
    # Absent it is transformers' default; null means that queries have no latent.
    has_query_rank = config.get("q_lora_rank", 1536) is not None
    return LatentSpec(
        size=fields["size"],
        num_heads=fields["num_heads"],
        query_rank=reader.positive("q_lora_rank", default=1536) if has_query_rank else None,
        kv_rank=reader.positive("kv_lora_rank", default=512),
        plain_dim=plain_dim,
        rope_dim=rope.size,
        value_dim=reader.positive("v_head_dim", default=128),
        scale=latent_scale(plain_dim + rope.size, rope),
        is_interleaved=reader.optional("rope_interleave", bool, True),
        has_bias=reader.optional("attention_bias", bool, False),
    )


Model = LatentDecoder
kv_groups = latent_decoder.kv_groups
