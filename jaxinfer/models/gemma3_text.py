"""Gemma 3, text (HF Gemma3ForCausalLM, arXiv:2503.19786): queries and keys normalised, five windowed layers for each full one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxinfer.layers import decoder
from jaxinfer.layers.decoder import Decoder, DecoderConfig
from jaxinfer.models.config import ConfigReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(DecoderConfig):
    """The architecture, from config.json."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], file: str) -> Config:
        """Read config.json.

        Raises:
            CheckpointError: an attribute is missing or of the wrong type.
            UnsupportedModelError: an attribute asks for what is not implemented.
        """
        reader = ConfigReader(config, file)
        fields = reader.decoder_fields(is_tied=True, head_dim=256, max_positions=131_072)
        reader.only("hidden_activation", "gelu_pytorch_tanh")
        reader.only("use_bidirectional_attention", False)
        reader.only("attn_logit_softcapping")
        num_layers, has_bias = reader.positive("num_hidden_layers"), reader.optional("attention_bias", bool, False)
        window, pattern = reader.window(), reader.positive("sliding_window_pattern", default=6)
        reader.ignore("_sliding_window_pattern")
        rope = partial(reader.rope, head_dim=fields["head_dim"], max_positions=fields["max_positions"])
        result = cls(
            **fields,
            layers=reader.layer_kinds(window, [(index + 1) % pattern != 0 for index in range(num_layers)], window_rope=1),
            ropes=(
                rope(layer_type="full_attention", default_theta=1_000_000.0),
                rope(layer_type="sliding_attention", theta_name="rope_local_base_freq", is_scaled=False),
            ),
            norms="around",
            norm_style="offset",
            qk_norm="head",
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            activation="gelu_tanh",
            attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
            logits_soft_cap=reader.cap("final_logit_softcapping"),
            embedding_scale=fields["size"] ** 0.5,
        )
        reader.finish()
        return result


Model = Decoder
kv_groups = decoder.kv_groups
