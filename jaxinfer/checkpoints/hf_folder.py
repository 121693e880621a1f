"""Hugging Face folders -> Checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.checkpoints.json_file import read_json_file
from jaxinfer.checkpoints.safetensors import open_safetensors_folder
from jaxinfer.checkpoints.source import Checkpoint

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


def open_hf_folder(folder: Path, *, name: str | None = None) -> Checkpoint:
    """Open a folder with config.json and safetensors; headers are checked, weights are read lazily.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    config = read_json_file(folder / CONFIG_FILE)
    generation = folder / GENERATION_CONFIG_FILE
    return Checkpoint(
        name=name or folder.resolve().name,
        path=folder,
        config=config,
        tensors=open_safetensors_folder(folder),
        generation_config=read_json_file(generation) if generation.exists() else {},
        tokenizer_source=partial(_load_tokenizer, folder),
    )


def _load_tokenizer(folder: Path) -> Tokenizer:
    from jaxinfer.tokenizer import Tokenizer  # late: the tokenizers library is not needed for weights

    return Tokenizer.from_folder(folder)
