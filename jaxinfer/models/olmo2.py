"""OLMo 2 (HF Olmo2ForCausalLM): norms after attention and MLP, queries and keys normalised over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.layers import decoder
from jaxinfer.layers.decoder import Decoder, DecoderConfig, LayerKind
from jaxinfer.models.config import ConfigReader, stretched_positions


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
        fields = reader.decoder_fields(norm_eps=1e-5)
        reader.only("hidden_act", "silu")
        has_bias = reader.optional("attention_bias", bool, False)
        rope = reader.rope(head_dim=fields["head_dim"], max_positions=fields["max_positions"], default_theta=10_000.0)
        result = cls(
            **fields | {"max_positions": stretched_positions(rope, fields["max_positions"])},
            layers=(LayerKind(),) * reader.positive("num_hidden_layers"),
            ropes=(rope,),
            norms="after",
            norm_style="float32",
            qk_norm="all",
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
        )
        reader.finish()
        return result


Model = Decoder
kv_groups = decoder.kv_groups
