"""A GGUF of a Llama model as Hugging Face names tensors: what the oracle computes with, read without any code of jaxinfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return f"{_TOP_NAMES[name.removesuffix('.weight')]}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _rope_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from llama.cpp's order (pairs of a rotation adjacent) to Hugging Face's (first halves, then second halves)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_gguf(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Float32 tensors by Hugging Face name (matrices `[out, in]`), and the configuration with Hugging Face's keys."""
    reader = gguf.GGUFReader(path)

    def value(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    config = {
        "num_hidden_layers": value("block_count"),
        "hidden_size": value("embedding_length"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("rope.dimension_count"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        weights[_hf_name(tensor.name)] = _rope_halves(weight, heads[part]) if part in heads else weight
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    return weights, config
