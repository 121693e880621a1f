"""The fixtures that other tests rely on."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file


def test_eight_cpu_devices() -> None:
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_dtypes_and_ranks_are_never_promoted_silently() -> None:
    with pytest.raises(Exception, match="dtype promotion"):
        _ = jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match="rank_promotion"):
        _ = jnp.ones((2, 2)) + jnp.ones(2)


def test_tiny_llama_is_a_folder_that_transformers_understands(tiny_llama: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny_llama)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    weights = load_file(tiny_llama / "model.safetensors")
    assert config.num_hidden_layers == json.loads((tiny_llama / "config.json").read_text())["num_hidden_layers"] == 2
    assert weights["model.embed_tokens.weight"].shape == (config.vocab_size, config.hidden_size)
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.decode(tokenizer("The capital of France")["input_ids"]) == "The capital of France"
