"""Qwen3: queries and keys are normalised per head, and heads are not size / num_heads wide."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "max_window_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 300.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}

CASE = Case(
    name="qwen3",
    config=CONFIG,
    is_quick=True,
    features=(
        Feature(name="norm of queries", tensors={"q_norm": "ones"}),
        Feature(name="norm of keys", tensors={"k_norm": "ones"}),
        Feature(name="norms per head", fields={"qk_norm": None}, tensors={"[qk]_norm": "absent"}),
        Feature(name="rope theta", config={"rope_theta": 10000.0}),
    ),
)
