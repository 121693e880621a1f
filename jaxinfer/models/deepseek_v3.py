"""DeepSeek-V3 and R1 (HF DeepseekV3ForCausalLM, arXiv:2412.19437): V2 with sigmoid routing that a correction balances.

The layers after the last one, which predict several tokens at once, are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.layers import latent_decoder
from jaxinfer.layers.decoder import LayerKind
from jaxinfer.layers.latent_decoder import LatentConfig, LatentDecoder
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
            latent=reader.latent(fields, rope, is_interleaved=reader.optional("rope_interleave", bool, True)),
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


Model = LatentDecoder
kv_groups = latent_decoder.kv_groups
