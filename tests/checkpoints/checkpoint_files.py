"""Small checkpoints made on the fly: GGUF files by gguf's own writer, safetensors by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file

EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 64, 4, 2, 8, 2

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}

METADATA: Mapping[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": EMBED,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
}

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    **{
        f"model.layers.{layer}.{theirs}.weight": f"blk.{layer}.{ours}.weight"
        for layer in range(LAYERS)
        for theirs, ours in {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }.items()
    },
}
"""Hugging Face's name -> llama.cpp's."""


def byte_vocabulary() -> list[str]:
    """The 256 byte characters of GPT-2's alphabet, three special tokens and one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)] + ["<|im_start|>", "<|im_end|>", "<|pad|>", "he"]


def hf_tensors(seed: int = 0, tied: bool = True) -> dict[str, np.ndarray]:
    """Random float32 weights of the model above, in Hugging Face's names and layout."""
    rng = np.random.default_rng(seed)
    vocab, queries, keys = HF_CONFIG["vocab_size"], HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, EMBED), "model.norm.weight": (EMBED,)}
    for layer in range(LAYERS):
        part = f"model.layers.{layer}."
        shapes |= {part + "input_layernorm.weight": (EMBED,), part + "post_attention_layernorm.weight": (EMBED,)}
        shapes |= {part + "self_attn.q_proj.weight": (queries, EMBED), part + "self_attn.k_proj.weight": (keys, EMBED)}
        shapes |= {part + "self_attn.v_proj.weight": (keys, EMBED), part + "self_attn.o_proj.weight": (EMBED, queries)}
        shapes |= {part + "mlp.gate_proj.weight": (MLP, EMBED), part + "mlp.up_proj.weight": (MLP, EMBED)}
        shapes |= {part + "mlp.down_proj.weight": (EMBED, MLP)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, EMBED)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_cpp_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order, written out: row 2i+p of a head is Hugging Face's row p*D/2+i."""
    head_dim = rows.shape[0] // num_heads
    moved = np.empty_like(rows)
    for head in range(num_heads):
        for index in range(head_dim // 2):
            for part in range(2):
                moved[head * head_dim + 2 * index + part] = rows[head * head_dim + part * (head_dim // 2) + index]
    return moved


def gguf_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face's tensors as llama.cpp names and orders them."""
    moved = {}
    for name, tensor in tensors.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        moved[NAMES[name]] = tensor if heads is None else llama_cpp_rows(tensor, heads)
    return moved


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    vocabulary: bool = False,
) -> Path:
    """Write a GGUF with gguf's own writer. `metadata` overrides METADATA, None removes a field; `kinds` gives raw types."""
    fields = {**METADATA, **(byte_level_fields() if vocabulary else {}), **(metadata or {})}
    return write_any_gguf(path, architecture, fields, gguf_tensors(hf_tensors()) if tensors is None else tensors, kinds)


def byte_level_fields() -> dict[str, Any]:
    """A whole tokenizer: bytes and one merge."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": byte_vocabulary(),
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }


def write_any_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a GGUF of any architecture with gguf's own writer; fields that are None are left out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add_field(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        adders[type(value)](key, value)


def write_hf_folder(folder: Path, shards: int = 1, tied: bool = True) -> dict[str, np.ndarray]:
    """Write config.json and safetensors; gives the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors(tied=tied)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, "tie_word_embeddings": tied}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    names = sorted(tensors)
    files = {name: f"model-{index % shards + 1:05d}-of-{shards:05d}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return tensors
