"""GGUF files -> Checkpoint.

Architecture `llama` only: its metadata becomes a Hugging Face config (gguf_config.py), its tensors get Hugging Face's names,
and the row order that llama.cpp gives to the query and key projections is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf.quants
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.checkpoints.gguf_config import config_from_metadata, generation_config_from_metadata
from jaxinfer.checkpoints.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor
from jaxinfer.checkpoints.stored_bytes import read_stored_bytes
from jaxinfer.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

PLAIN_TYPES: Mapping[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
"""Stored as they are; every other type is dequantised to float32."""

IGNORED_NAMES = ("rope_freqs.weight",)
"""Frequency factors: gguf_config turns them into rope_scaling."""


def open_gguf(path: Path, *, name: str | None = None) -> Checkpoint:
    """Open a GGUF file; its header is checked whole, its weights are read lazily.

    Raises:
        CheckpointError: the file is damaged, or its tensors do not fit its metadata.
        UnsupportedModelError: another architecture, or a variant that is not implemented.
    """
    header = read_gguf_header(path)
    config = config_from_metadata(header, lambda tensor_name: _read(path, tensor_name, header.tensors[tensor_name]))
    tensors = _hf_tensors(header, config)
    return Checkpoint(
        name=name or path.stem,
        path=path,
        config=config,
        tensors=tensors,
        generation_config=generation_config_from_metadata(header, config["vocab_size"]),
        tokenizer_source=partial(_load_tokenizer, path),
    )


def _load_tokenizer(path: Path) -> Tokenizer:
    from jaxinfer.checkpoints.gguf_tokenizer import tokenizer_from_gguf  # late: the tokenizers library is not needed for weights

    return tokenizer_from_gguf(path)


def unpermute_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of a query or key projection, `[H*D, E]` or `[H*D]`.

    llama.cpp rotates neighbouring rows (2i, 2i+1) of a head; Hugging Face rotates row i with row i + D/2. So row 2i + p of
    a head goes back to row i + p*D/2 (the inverse of `permute` in llama.cpp's convert_hf_to_gguf.py).
    """
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """What a tensor of the GGUF becomes. `num_heads` is set where the rows' order must be undone."""

    hf_name: str
    shape: tuple[int, ...]
    num_heads: int | None = None


def expected_tensors(config: Mapping[str, Any]) -> dict[str, ExpectedTensor]:
    """GGUF name -> what a Llama of this configuration needs."""
    embed, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    matrix = (config["vocab_size"], embed)
    expected = {
        "token_embd.weight": ExpectedTensor("model.embed_tokens.weight", matrix),
        "output_norm.weight": ExpectedTensor("model.norm.weight", (embed,)),
    }
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = ExpectedTensor("lm_head.weight", matrix)
    projections = (
        ("attn_q", "self_attn.q_proj", heads * head_dim, embed, heads, config["attention_bias"]),
        ("attn_k", "self_attn.k_proj", kv_heads * head_dim, embed, kv_heads, config["attention_bias"]),
        ("attn_v", "self_attn.v_proj", kv_heads * head_dim, embed, None, config["attention_bias"]),
        ("attn_output", "self_attn.o_proj", embed, heads * head_dim, None, config["attention_bias"]),
        ("ffn_gate", "mlp.gate_proj", mlp, embed, None, config["mlp_bias"]),
        ("ffn_up", "mlp.up_proj", mlp, embed, None, config["mlp_bias"]),
        ("ffn_down", "mlp.down_proj", embed, mlp, None, config["mlp_bias"]),
    )
    for layer in range(config["num_hidden_layers"]):
        blk, hf = f"blk.{layer}.", f"model.layers.{layer}."
        expected[blk + "attn_norm.weight"] = ExpectedTensor(hf + "input_layernorm.weight", (embed,))
        expected[blk + "ffn_norm.weight"] = ExpectedTensor(hf + "post_attention_layernorm.weight", (embed,))
        for ours, theirs, rows, columns, num_heads, has_bias in projections:
            expected[f"{blk}{ours}.weight"] = ExpectedTensor(f"{hf}{theirs}.weight", (rows, columns), num_heads)
            if has_bias:
                expected[f"{blk}{ours}.bias"] = ExpectedTensor(f"{hf}{theirs}.bias", (rows,), num_heads)
    return expected


def _hf_tensors(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in header.tensors]
    if missing:
        raise CheckpointError(f"the tensor is missing ({len(missing)} are)", file=str(header.path), field=missing[0])
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in header.tensors.items():
        if name in IGNORED_NAMES:
            continue
        if name not in expected:
            raise CheckpointError("this tensor has no place in a model of this architecture and size", file=str(header.path), field=name)
        want = expected[name]
        if tensor.shape != want.shape:
            raise CheckpointError(f"shape {tensor.shape}, but the metadata asks for {want.shape}", file=str(header.path), field=name)
        tensors[want.hf_name] = _lazy(header, name, want.num_heads)
    return tensors


def _lazy(header: GGUFHeader, name: str, num_heads: int | None) -> LazyTensor:
    tensor = header.tensors[name]
    dtype = PLAIN_TYPES.get(tensor.kind, np.dtype(np.float32))
    if tensor.kind not in PLAIN_TYPES and not _can_dequantize(tensor.kind):
        raise UnsupportedModelError(f"{header.path}: {name}: tensors of type {tensor.kind.name} cannot be dequantised")
    # Bound to the path and not to the header, whose metadata (the whole vocabulary) should not live as long as the weights.
    return LazyTensor(shape=tensor.shape, dtype=dtype.name, read=partial(_read, header.path, name, tensor, num_heads))


def _read(path: Path, name: str, tensor: GGUFTensor, num_heads: int | None = None) -> np.ndarray:
    """The tensor; quantised types as float32. With `num_heads`, rows in Hugging Face's order."""
    stored = read_stored_bytes(path, name, tensor.offset, tensor.num_bytes)
    plain = PLAIN_TYPES.get(tensor.kind)
    if plain is not None:
        rows = stored.view(plain).reshape(tensor.shape)
    else:
        rows = gguf.quants.dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.kind)
    return rows if num_heads is None else unpermute_rows(rows, num_heads)


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether the library knows the type, asked of the library itself with a block of zeros."""
    _, type_size = GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
