"""Gemma 2 (HF Gemma2ForCausalLM, arXiv:2408.00118): soft caps, norms around, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        fields = reader.decoder_fields(is_tied=True, head_dim=256, max_positions=8192)
        reader.only("hidden_activation", "gelu_pytorch_tanh")
        reader.ignore("hidden_act")  # what the first published files had; never read
        reader.only("use_bidirectional_attention", False)
        num_layers, has_bias = reader.positive("num_hidden_layers"), reader.optional("attention_bias", bool, False)
        window = reader.window()
        reader.only("sliding_window_size", window)  # stands in the files of 9B and 27B as well
        result = cls(
            **fields,
            layers=reader.layer_kinds(window, [index % 2 == 0 for index in range(num_layers)]),
            ropes=(reader.rope(head_dim=fields["head_dim"], max_positions=fields["max_positions"]),),
            norms="around",
            norm_style="offset",
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            activation="gelu_tanh",
            attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
            soft_cap=reader.cap("attn_logit_softcapping", 50.0),
            logits_soft_cap=reader.cap("final_logit_softcapping", 30.0),
            embedding_scale=fields["size"] ** 0.5,
        )
        reader.finish()
        return result


Model = Decoder
kv_groups = decoder.kv_groups
