"""Mistral: a sliding window in every layer."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 300.0,
    "sliding_window": 10,
    "tie_word_embeddings": False,
}

CASE = Case(
    name="mistral",
    config=CONFIG,
    is_quick=True,
    features=(
        Feature(name="window", config={"sliding_window": 1000}),
        Feature(name="no window at all", config={"sliding_window": None}),
        Feature(name="size of the window", config={"sliding_window": 11}),
    ),
)
