"""Llama whose positions are divided by a factor."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 300.0,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "linear", "factor": 4.0},
}

CASE = Case(
    name="llama_linear",
    config=CONFIG,
    gains={"embed_tokens": 0.3},
    prompt_lens=(9, 38),
    features=(
        Feature(name="rope scaling", config={"rope_scaling": None}),
        Feature(name="factor", config={"rope_scaling": {"type": "linear", "factor": 3.0}}),
    ),
)
