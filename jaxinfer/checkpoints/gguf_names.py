"""What the tensors of a GGUF file are called in Hugging Face's checkpoints, per `model_type`.

Names: `TENSOR_NAMES` of gguf.constants, and the `state_dict` of transformers' models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

HeadRows = Literal["query", "key"] | None


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """What a tensor of the GGUF becomes.

    `num_heads` is set where llama.cpp's order of rows must be undone. `is_offset`: the file holds 1 + w, Hugging Face w.
    """

    hf_name: str
    shape: tuple[int, ...]
    num_heads: int | None = None
    is_offset: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of every layer; `rows` and `columns` name sizes, a norm has no columns."""

    gguf_name: str
    hf_name: str
    rows: str
    columns: str | None = None
    heads: HeadRows = None
    bias: str | None = None
    """The attribute of the configuration that says whether there is a bias."""


_ATTENTION = (
    _Part("attn_q", "self_attn.q_proj", "queries", "embed"),
    _Part("attn_k", "self_attn.k_proj", "keys", "embed"),
    _Part("attn_v", "self_attn.v_proj", "keys", "embed"),
    _Part("attn_output", "self_attn.o_proj", "embed", "queries"),
)
_MLP = (
    _Part("ffn_gate", "mlp.gate_proj", "mlp", "embed"),
    _Part("ffn_up", "mlp.up_proj", "mlp", "embed"),
    _Part("ffn_down", "mlp.down_proj", "embed", "mlp"),
)
_PRE_NORMS = (
    _Part("attn_norm", "input_layernorm", "embed"),
    _Part("ffn_norm", "post_attention_layernorm", "embed"),
)
_SANDWICH_NORMS = (
    _Part("attn_norm", "input_layernorm", "embed"),
    _Part("post_attention_norm", "post_attention_layernorm", "embed"),
    _Part("ffn_norm", "pre_feedforward_layernorm", "embed"),
    _Part("post_ffw_norm", "post_feedforward_layernorm", "embed"),
)
_QK_NORMS = (
    _Part("attn_q_norm", "self_attn.q_norm", "head"),
    _Part("attn_k_norm", "self_attn.k_norm", "head"),
)
_LLAMA = (
    _Part("attn_q", "self_attn.q_proj", "queries", "embed", heads="query", bias="attention_bias"),
    _Part("attn_k", "self_attn.k_proj", "keys", "embed", heads="key", bias="attention_bias"),
    _Part("attn_v", "self_attn.v_proj", "keys", "embed", bias="attention_bias"),
    _Part("attn_output", "self_attn.o_proj", "embed", "queries", bias="attention_bias"),
    _Part("ffn_gate", "mlp.gate_proj", "mlp", "embed", bias="mlp_bias"),
    _Part("ffn_up", "mlp.up_proj", "mlp", "embed", bias="mlp_bias"),
    _Part("ffn_down", "mlp.down_proj", "embed", "mlp", bias="mlp_bias"),
)
_QWEN2 = (
    _Part("attn_q", "self_attn.q_proj", "queries", "embed", bias="always"),
    _Part("attn_k", "self_attn.k_proj", "keys", "embed", bias="always"),
    _Part("attn_v", "self_attn.v_proj", "keys", "embed", bias="always"),
    _Part("attn_output", "self_attn.o_proj", "embed", "queries"),
)
_PHI3 = (
    _Part("attn_qkv", "self_attn.qkv_proj", "queries_keys_values", "embed"),
    _Part("attn_output", "self_attn.o_proj", "embed", "queries"),
    _Part("ffn_up", "mlp.gate_up_proj", "gate_up", "embed"),
    _Part("ffn_down", "mlp.down_proj", "embed", "mlp"),
)
_PARTS: Mapping[str, tuple[_Part, ...]] = {
    "llama": (*_PRE_NORMS, *_LLAMA),
    "qwen2": (*_PRE_NORMS, *_QWEN2, *_MLP),
    "qwen3": (*_PRE_NORMS, *_QK_NORMS, *_ATTENTION, *_MLP),
    "gemma2": (*_SANDWICH_NORMS, *_ATTENTION, *_MLP),
    "gemma3_text": (*_SANDWICH_NORMS, *_QK_NORMS, *_ATTENTION, *_MLP),
    "phi3": (*_PRE_NORMS, *_PHI3),
}
_OFFSET_NORMS = ("gemma2", "gemma3_text")


def expected_tensors(config: Mapping[str, Any]) -> dict[str, ExpectedTensor]:
    """GGUF name -> what a model of this configuration needs."""
    embed, is_offset = config["hidden_size"], config["model_type"] in _OFFSET_NORMS
    matrix = (config["vocab_size"], embed)
    expected = {
        "token_embd.weight": ExpectedTensor("model.embed_tokens.weight", matrix),
        "output_norm.weight": ExpectedTensor("model.norm.weight", (embed,), is_offset=is_offset),
    }
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = ExpectedTensor("lm_head.weight", matrix)
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"blk.{layer}.{name}": tensor for name, tensor in _layer(config, f"model.layers.{layer}.", is_offset)}
    return expected


def _layer(config: Mapping[str, Any], prefix: str, is_offset: bool) -> Iterator[tuple[str, ExpectedTensor]]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    sizes = {
        "embed": config["hidden_size"],
        "mlp": config["intermediate_size"],
        "gate_up": 2 * config["intermediate_size"],
        "head": head_dim,
        "queries": heads * head_dim,
        "keys": kv_heads * head_dim,
        "queries_keys_values": (heads + 2 * kv_heads) * head_dim,
    }
    num_heads = {"query": heads, "key": kv_heads, None: None}
    for part in _PARTS[config["model_type"]]:
        rows = sizes[part.rows]
        if part.columns is None:
            yield f"{part.gguf_name}.weight", ExpectedTensor(f"{prefix}{part.hf_name}.weight", (rows,), is_offset=is_offset)
            continue
        shape = (rows, sizes[part.columns])
        yield f"{part.gguf_name}.weight", ExpectedTensor(f"{prefix}{part.hf_name}.weight", shape, num_heads[part.heads])
        if part.bias is not None and (part.bias == "always" or config[part.bias]):
            yield f"{part.gguf_name}.bias", ExpectedTensor(f"{prefix}{part.hf_name}.bias", (rows,), num_heads[part.heads])
