"""Mixtral: two of five experts, weighted by their renormalised probabilities; here with a window."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "num_local_experts": 5,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 300.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": 12,
    "tie_word_embeddings": False,
}

CASE = Case(
    name="mixtral",
    config=CONFIG,
    gains={r"mlp\.gate\.": 1.5, r"experts\.": 1.5},
    features=(
        Feature(name="renormalisation", fields={"routing": {"is_renormalized": False}}),
        Feature(name="number of experts", config={"num_experts_per_tok": 1}),
        Feature(name="router", tensors={r"block_sparse_moe\.gate\.": "zeros"}),
        Feature(name="fourth expert", tensors={r"experts\.3\.w2": "zeros"}),
        Feature(name="window", config={"sliding_window": None}),
        Feature(name="rope theta", config={"rope_theta": 10000.0}),
    ),
)
