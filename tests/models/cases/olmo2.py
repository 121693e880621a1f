"""OLMo 2: norms after attention and MLP instead of before, queries and keys normalised over all heads at once."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 300.0,
    "tie_word_embeddings": False,
}

CASE = Case(
    name="olmo2",
    config=CONFIG,
    features=(
        Feature(name="norm of queries", tensors={"q_norm": "ones"}),
        Feature(name="norm of keys", tensors={"k_norm": "ones"}),
        Feature(name="norms over all heads", fields={"qk_norm": None}, tensors={"[qk]_norm": "absent"}),
        Feature(name="norm after attention", tensors={"post_attention_layernorm": "ones"}),
        Feature(name="norm after the MLP", tensors={"post_feedforward_layernorm": "ones"}),
    ),
)
