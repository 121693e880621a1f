"""What every checkpoint format is turned into: a configuration and lazily read tensors, in Hugging Face's names and layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxinfer.quant.weight import QuantizedWeight
    from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A quantized tensor as it is stored: integers and scales."""

    abstract: QuantizedWeight
    """Its parts as ShapeDtypeStructs."""
    read: Callable[[], QuantizedWeight]
    """Its parts as numpy arrays. They stand for [out, in], or a stack of such, also where `LazyTensor.read` gives [in, out]."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One tensor of a file that has been checked to hold it; nothing is read before `read()`.

    `dtype` is the name of what `read()` gives (`float32`, `bfloat16`, `float16`, …): quantised GGUF types become float32.
    Matrices are oriented `[out, in]`, as in Hugging Face's files. The array may be a read-only view of the file.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]
    packed: PackedTensor | None = None
    """Set where the tensor is stored quantized and can be multiplied so."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        name: short name, as `/v1/models` lists it.
        path: the GGUF file or the folder.
        config: in the shape of Hugging Face's config.json, whatever the format on disk.
        tensors: by Hugging Face's name. A GGUF without an output matrix has no `lm_head.weight` and
            `config["tie_word_embeddings"]` is true; a folder's tensors are listed as they stand in its files.
        generation_config: in the shape of generation_config.json; empty when the folder has none.
        tokenizer_source: reads the tokenizer; use `load_tokenizer`.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    generation_config: Mapping[str, Any]
    tokenizer_source: Callable[[], Tokenizer]

    def load_tokenizer(self) -> Tokenizer:
        """Read the tokenizer that came with the weights.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return self.tokenizer_source()
