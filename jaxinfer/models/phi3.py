"""Phi-3 and Phi-4-mini (HF Phi3ForCausalLM): Llama with fused projections, LongRoPE, part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.layers import decoder
from jaxinfer.layers.decoder import Decoder, DecoderConfig, LayerKind
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
        fields = reader.decoder_fields(norm_eps=1e-5, max_positions=4096)
        reader.only("hidden_act", "silu")
        reader.only("lm_head_bias", False)
        reader.only("full_attn_mod", 1)  # this and the next stand in Phi-4-mini's file, for its remote code
        reader.only("interpolate_factor", 1)
        rope = reader.rope(
            head_dim=fields["head_dim"],
            max_positions=fields["max_positions"],
            is_partial=True,
            aliases={"su": "longrope", "yarn": "longrope"},
        )
        result = cls(
            **fields,
            layers=(LayerKind(window=reader.window(None)),) * reader.positive("num_hidden_layers"),
            ropes=(rope,),
            is_fused=True,
        )
        reader.finish()
        return result


Model = Decoder
kv_groups = decoder.kv_groups
