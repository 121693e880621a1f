"""Hugging Face folders -> Checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.checkpoints.config_bounds import check_sizes
from jaxinfer.checkpoints.json_file import read_json_file
from jaxinfer.checkpoints.safetensors import open_safetensors_folder
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
QUANTIZATION_KEY = "quantization_config"


def open_hf_folder(folder: Path, *, name: str | None = None) -> Checkpoint:
    """Open a folder with config.json and safetensors; headers are checked, weights are read lazily.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModelError: the weights are quantized in a way that is not implemented.
    """
    config = read_json_file(folder / CONFIG_FILE)
    tensors = _with_prefix(config, open_safetensors_folder(folder))
    if config.get(QUANTIZATION_KEY) is not None:
        from jaxinfer.checkpoints.prequantized import unpack_quantized  # late: it needs jax

        config, tensors = unpack_quantized(config, tensors, str(folder))
    check_sizes(config, tensors, str(folder / CONFIG_FILE))
    generation = folder / GENERATION_CONFIG_FILE
    return Checkpoint(
        name=name or folder.resolve().name,
        path=folder,
        config=config,
        tensors=tensors,
        generation_config=read_json_file(generation) if generation.exists() else {},
        tokenizer_source=partial(load_tokenizer, folder),
    )


def _with_prefix(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """Tensors of a model that was saved without its head, such as GPT-2's on the Hub, named as with one."""
    prefix = "transformer." if config.get("model_type") == "gpt2" else "model."
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in tensors.items()}


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder."""
    from jaxinfer.tokenizer import Tokenizer  # late: the tokenizers library is not needed for weights

    return Tokenizer.from_folder(folder)
