"""Qwen2 and Qwen2.5 (HF Qwen2ForCausalLM): Llama with biases of queries, keys and values, and windows in the later layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.layers import decoder
from jaxinfer.layers.decoder import Decoder, DecoderConfig
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
        fields = reader.decoder_fields(max_positions=32768)
        reader.only("hidden_act", "silu")
        rope = reader.rope(head_dim=fields["head_dim"], max_positions=fields["max_positions"])
        num_layers, first = reader.positive("num_hidden_layers"), reader.optional("max_window_layers", int, 28)
        window = reader.window() if reader.optional("use_sliding_window", bool, False) else None
        reader.ignore("sliding_window")  # without use_sliding_window it means nothing
        result = cls(
            **fields | {"max_positions": _within_a_chunk(reader, stretched_positions(rope, fields["max_positions"]))},
            layers=reader.layer_kinds(window, [window is not None and index >= first for index in range(num_layers)]),
            ropes=(rope,),
            has_qkv_bias=True,
        )
        reader.finish()
        return result


def _within_a_chunk(reader: ConfigReader, max_positions: int) -> int:
    """The context of Qwen2.5-1M: its dual chunk attention (arXiv:2402.17463) is plain attention up to the first chunk's end."""
    name = "dual_chunk_attention_config"
    settings = reader.optional(name, dict, {})
    if not settings:
        return max_positions
    inner = ConfigReader(settings, reader.file, prefix=f"{name}.")
    chunk_size = inner.positive("chunk_size")
    inner.ignore("local_size")  # how much of a chunk overlaps the next
    # Past this length scores are scaled as well.
    original = inner.positive("original_max_position_embeddings", default=chunk_size)
    inner.finish()
    return min(max_positions, chunk_size, original)


Model = Decoder
kv_groups = decoder.kv_groups
