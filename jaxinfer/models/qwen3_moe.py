"""Qwen3-MoE (HF Qwen3MoeForCausalLM): Qwen3 with experts in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.layers import decoder
from jaxinfer.layers.decoder import Decoder, LayerKind
from jaxinfer.layers.moe import MoEConfig, decoder_moe
from jaxinfer.layers.routing import SoftmaxTopK
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
        fields = reader.decoder_fields(max_positions=32768)
        reader.only("hidden_act", "silu")
        reader.ignore("output_router_logits", "router_aux_loss_coef")  # for training
        reader.only("use_qk_norm", True)  # this and the next two stand in Qwen3-Coder's files
        reader.only("qkv_bias", False)
        reader.only("shared_expert_intermediate_size", 0)
        reader.ignore("max_window_layers")  # which layers have the window is Qwen3's; here it is all or none
        rope = reader.rope(head_dim=fields["head_dim"], max_positions=fields["max_positions"])
        window = reader.positive("sliding_window", default=4096) if reader.optional("use_sliding_window", bool, False) else None
        reader.ignore("sliding_window")  # without use_sliding_window it means nothing
        has_bias = reader.optional("attention_bias", bool, False)
        num_layers, step = reader.positive("num_hidden_layers"), reader.positive("decoder_sparse_step", default=1)
        dense = {index for index in range(num_layers) if (index + 1) % step} | set(reader.optional("mlp_only_layers", list, []))
        # Hugging Face's own files call it num_experts, what transformers 5 writes num_local_experts.
        name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        num_experts, num_chosen = reader.expert_counts(name, default=128, default_chosen=8)
        result = cls(
            **fields | {"max_positions": stretched_positions(rope, fields["max_positions"])},
            layers=(LayerKind(window=window),) * num_layers,
            ropes=(rope,),
            qk_norm="head",
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            num_experts=num_experts,
            expert_size=reader.positive("moe_intermediate_size", default=768),
            routing=SoftmaxTopK(num_chosen=num_chosen, is_renormalized=reader.optional("norm_topk_prob", bool, False)),
            dense_layers=frozenset(dense),
        )
        reader.finish()
        return result


class Model(Decoder):
    """A decoder with experts in place of its MLPs where they are not dense."""

    def __init__(self, config: Config, mesh: Mesh, dtype: jnp.dtype, max_model_len: int):
        super().__init__(config, mesh, dtype, max_model_len, make_mlp=partial(decoder_moe, config, mesh, dtype))


kv_groups = decoder.kv_groups
