"""Granite: multipliers of embedding, residuals, scores and logits."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.12,
    "embedding_multiplier": 3.0,
    "hidden_act": "silu",
    "logits_scaling": 2.0,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "residual_multiplier": 0.6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 300.0,
    "tie_word_embeddings": True,
}

CASE = Case(
    name="granite",
    config=CONFIG,
    gains={"embed_tokens": 0.08, r"model\.norm": 2.0},
    features=(
        Feature(name="attention multiplier", config={"attention_multiplier": 0.25}),
        Feature(name="embedding multiplier", config={"embedding_multiplier": 1.0}),
        Feature(name="residual multiplier", config={"residual_multiplier": 1.0}),
        Feature(name="logits scaling", config={"logits_scaling": 1.0}),
    ),
)
