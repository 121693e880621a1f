"""GGUF files -> Checkpoint.

The metadata becomes a Hugging Face config (gguf_config.py), the tensors get Hugging Face's names (gguf_names.py), the row order
that llama.cpp gives to Llama's query and key projections is undone, and so is the one that it adds to Gemma's norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf.quants
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.checkpoints.gguf_config import config_from_metadata, generation_config_from_metadata
from jaxinfer.checkpoints.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from jaxinfer.checkpoints.gguf_names import ExpectedTensor, expected_tensors
from jaxinfer.checkpoints.gguf_rope import LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor, PackedTensor
from jaxinfer.checkpoints.stored_bytes import read_stored_bytes
from jaxinfer.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from jaxinfer.quant.weight import QuantizedWeight
    from jaxinfer.tokenizer import Tokenizer

PLAIN_TYPES: Mapping[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
"""Stored as they are; every other type is dequantised to float32."""

IGNORED_NAMES: Mapping[str, tuple[str, ...]] = {"llama": (LLAMA3_FACTORS,), "phi3": (LONG_FACTORS, SHORT_FACTORS)}
"""Frequency factors: gguf_config turns them into rope_scaling."""
MAX_FACTORS_BYTES = 2**16


def open_gguf(path: Path, *, name: str | None = None) -> Checkpoint:
    """Open a GGUF file; its header is checked whole, its weights are read lazily.

    Raises:
        CheckpointError: the file is damaged, or its tensors do not fit its metadata.
        UnsupportedModelError: another architecture, or a variant that is not implemented.
    """
    header = read_gguf_header(path)
    config = config_from_metadata(header, partial(_read_factors, header))
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


def _hf_tensors(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in header.tensors]
    if missing:
        raise CheckpointError(f"the tensor is missing ({len(missing)} are)", file=str(header.path), field=missing[0])
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in header.tensors.items():
        if name in IGNORED_NAMES.get(config["model_type"], ()):
            continue
        if name not in expected:
            raise CheckpointError("this tensor has no place in a model of this architecture and size", file=str(header.path), field=name)
        want = expected[name]
        if tensor.shape != want.shape:
            raise CheckpointError(f"shape {tensor.shape}, but the metadata asks for {want.shape}", file=str(header.path), field=name)
        tensors[want.hf_name] = _lazy(header.path, name, tensor, want)
    return tensors


def _lazy(path: Path, name: str, tensor: GGUFTensor, want: ExpectedTensor) -> LazyTensor:
    if tensor.kind not in PLAIN_TYPES and not _can_dequantize(tensor.kind):
        raise UnsupportedModelError(f"{path}: {name}: tensors of type {tensor.kind.name} cannot be dequantised")
    if tensor.kind not in PLAIN_TYPES and len(tensor.shape) == 1 and want.num_heads is not None:
        raise UnsupportedModelError(f"{path}: {name}: a bias of type {tensor.kind.name}, whose rows cannot be put in order")
    dtype = np.dtype(np.float32) if want.is_offset else PLAIN_TYPES.get(tensor.kind, np.dtype(np.float32))
    # Bound to the path and not to the header, whose metadata (the whole vocabulary) should not live as long as the weights.
    read = partial(_read_hf, path, name, tensor, want)
    return LazyTensor(shape=tensor.shape, dtype=dtype.name, read=read, packed=_packed(path, name, tensor, want))


def _packed(path: Path, name: str, tensor: GGUFTensor, want: ExpectedTensor) -> PackedTensor | None:
    """How to read the tensor without dequantising it; None where its type is not multiplied as it is stored."""
    if tensor.kind in PLAIN_TYPES or len(tensor.shape) != 2:
        return None
    from jaxinfer.quant import gguf_blocks  # late: it needs jax

    abstract = gguf_blocks.abstract(tensor.kind, tensor.shape)
    if abstract is None:
        return None

    def read() -> QuantizedWeight:
        packed = gguf_blocks.pack(tensor.kind, _read_rows(path, name, tensor, want.num_heads))
        assert packed is not None  # abstract and pack know the same types
        return packed

    return PackedTensor(abstract=abstract, read=read)


def _read_hf(path: Path, name: str, tensor: GGUFTensor, want: ExpectedTensor) -> np.ndarray:
    """The tensor as Hugging Face stores it; quantised types as float32."""
    values = _values(tensor, _read_rows(path, name, tensor, want.num_heads))
    return values.astype(np.float32) - np.float32(1) if want.is_offset else values


def _read_factors(header: GGUFHeader, name: str) -> np.ndarray:
    """A small tensor that belongs to the configuration."""
    tensor = header.tensors[name]
    if tensor.kind not in PLAIN_TYPES or tensor.num_bytes > MAX_FACTORS_BYTES:
        raise CheckpointError(f"{tensor.kind.name} of shape {tensor.shape} cannot be rope factors", file=str(header.path), field=name)
    return _values(tensor, _read_rows(header.path, name, tensor)).astype(np.float32)


def _read_rows(path: Path, name: str, tensor: GGUFTensor, num_heads: int | None = None) -> np.ndarray:
    """The stored bytes, uint8 `[N, bytes of a row]`; with `num_heads`, rows in Hugging Face's order."""
    # A vector's rows are its numbers, unless they are stored in blocks.
    num_rows = tensor.shape[0] if len(tensor.shape) == 1 and tensor.kind in PLAIN_TYPES else prod(tensor.shape[:-1])
    rows = read_stored_bytes(path, name, tensor.offset, tensor.num_bytes).reshape(num_rows, -1)
    return rows if num_heads is None else unpermute_rows(rows, num_heads)


def _values(tensor: GGUFTensor, stored: np.ndarray) -> np.ndarray:
    plain = PLAIN_TYPES.get(tensor.kind)
    if plain is not None:
        return stored.reshape(-1).view(plain).reshape(tensor.shape)
    return gguf.quants.dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.kind)


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    """Whether the library knows the type, asked of the library itself with a block of zeros."""
    _, type_size = GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
