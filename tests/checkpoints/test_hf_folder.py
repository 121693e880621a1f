"""Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoints.hf_folder import open_hf_folder
from tests.tiny_llama import TINY


@pytest.mark.parametrize(
    ("model_type", "stored", "named"),
    [
        ("gpt2", {"wte.weight", "h.0.ln_1.bias"}, {"transformer.wte.weight", "transformer.h.0.ln_1.bias"}),
        ("gpt2", {"transformer.wte.weight"}, {"transformer.wte.weight"}),
        ("llama", {"embed_tokens.weight", "lm_head.weight"}, {"model.embed_tokens.weight", "lm_head.weight"}),
        ("llama", {"model.embed_tokens.weight", "norm.weight"}, {"model.embed_tokens.weight", "norm.weight"}),
    ],
)
def test_a_model_saved_without_its_head(tmp_path: Path, model_type: str, stored: set[str], named: set[str]) -> None:
    """GPT-2 on the Hub is one: its names lack the prefix. One name that has it says that all are as they should be."""
    save_file({name: np.zeros((64, 64), np.float32) for name in stored}, tmp_path / "model.safetensors")
    config = {"model_type": model_type, "n_layer": 1} if model_type == "gpt2" else TINY | {"num_hidden_layers": 1, "vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(open_hf_folder(tmp_path).tensors) == named
