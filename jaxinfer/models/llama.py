"""Llama (HF LlamaForCausalLM): pre-norm blocks, rotary grouped-query attention, SwiGLU; also SmolLM2."""

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
        fields = reader.decoder_fields()
        reader.only("hidden_act", "silu")
        reader.only("rope_interleaved", False)  # stands in SmolLM's files
        reader.ignore("max_sequence_length")  # stands in files of Llama 1 beside max_position_embeddings
        has_bias = reader.optional("attention_bias", bool, False)
        rope = reader.rope(head_dim=fields["head_dim"], max_positions=fields["max_positions"])
        result = cls(
            **fields | {"max_positions": stretched_positions(rope, fields["max_positions"])},
            layers=(LayerKind(),) * reader.positive("num_hidden_layers"),
            ropes=(rope,),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=reader.optional("mlp_bias", bool, False),
        )
        reader.finish()
        return result


Model = Decoder
kv_groups = decoder.kv_groups
