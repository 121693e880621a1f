"""Qwen2: biases of queries, keys and values; a window in the layers from max_window_layers on."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "max_window_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 300.0,
    "sliding_window": 10,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
}

CASE = Case(
    name="qwen2",
    config=CONFIG,
    gains={"embed_tokens": 0.3},
    features=(
        Feature(name="window", config={"use_sliding_window": False}),
        Feature(name="a window in both layers", config={"max_window_layers": 0}),
        Feature(name="size of the window", config={"sliding_window": 11}),
        *(Feature(name=f"{part} bias", tensors={rf"{part}_proj\.bias": "zeros"}) for part in "qkv"),
    ),
)
