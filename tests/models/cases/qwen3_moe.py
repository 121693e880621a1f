"""Qwen3-MoE: Qwen3's attention, one dense layer between two with experts, probabilities renormalised."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "max_window_layers": 3,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 300.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}

CASE = Case(
    name="qwen3_moe",
    config=CONFIG,
    gains={r"mlp\.gate\.": 1.5, r"experts\.": 1.5},
    features=(
        Feature(name="renormalisation", config={"norm_topk_prob": False}),
        Feature(name="number of experts", config={"num_experts_per_tok": 2}),
        Feature(name="router", tensors={r"mlp\.gate\.": "zeros"}),
        Feature(name="norm of queries", tensors={"q_norm": "ones"}),
        Feature(name="norm of keys", tensors={"k_norm": "ones"}),
        Feature(name="rope theta", config={"rope_theta": 10000.0}),
    ),
)
