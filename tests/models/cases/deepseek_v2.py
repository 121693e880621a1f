"""DeepSeek-V2: latent attention with a latent of queries too, experts chosen within groups, YaRN that scales the scores."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 32,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 3,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 0.001,
    "rope_scaling": {
        "beta_fast": 3,
        "beta_slow": 0.2,
        "factor": 4,
        "mscale": 0.9,
        "mscale_all_dim": 0.6,
        "original_max_position_embeddings": 16,
        "type": "yarn",
    },
    "rope_theta": 300.0,
    "routed_scaling_factor": 4.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 16,
}
GAINS = {r"q_[ab]_proj\.weight|kv_a_proj": 1.5, r"kv_b_proj|q_b_proj": 2.0, r"mlp\.gate\.": 1.5, r"experts\.": 1.5}

CASE = Case(
    name="deepseek_v2",
    config=CONFIG,
    gains=GAINS,
    features=(
        Feature(name="groups", config={"topk_method": "greedy"}),
        Feature(name="number of groups", config={"topk_group": 3}),
        Feature(name="scaling of routed experts", config={"routed_scaling_factor": 1.0}),
        Feature(name="shared experts", tensors={r"shared_experts\.down_proj": "zeros"}),
        Feature(name="router", tensors={r"mlp\.gate\.": "zeros"}),
        Feature(name="norm of the queries' latent", tensors={"q_a_layernorm": "ones"}),
        Feature(name="norm of the latent", tensors={"kv_a_layernorm": "ones"}),
        Feature(name="interleaved rotation", fields={"latent": {"is_interleaved": False}}),
        Feature(name="rope scaling", config={"rope_scaling": None}),
        *(
            Feature(name=key, config={"rope_scaling": CONFIG["rope_scaling"] | {key: value}})
            for key, value in (("mscale", 0.6), ("mscale_all_dim", 0.0))
        ),
    ),
)
