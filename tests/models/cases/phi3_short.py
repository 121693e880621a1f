"""Phi-3 with the short factors of LongRoPE: an engine whose max_model_len stays within the original context."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0, 2.5, 4.0, 6.0], "short_factor": [1.0, 1.2, 1.5, 2.0]},
    "rope_theta": 300.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

CASE = Case(
    name="phi3_short",
    config=CONFIG,
    prompt_lens=(3, 6),
    max_model_len=16,
    features=(
        Feature(name="short factors", config={"rope_scaling": CONFIG["rope_scaling"] | {"short_factor": [1.0, 2.5, 4.0, 6.0]}}),
        Feature(name="attention factor", config={"rope_scaling": CONFIG["rope_scaling"] | {"attention_factor": 1.0}}),
    ),
)
