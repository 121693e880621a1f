"""Gemma 3: queries and keys normalised, two rotations (the global one scaled), a window in all layers but each third."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 128,
    "query_pre_attn_scalar": 7,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_theta": 1000.0,
    "sliding_window": 10,
    "sliding_window_pattern": 3,
}

CASE = Case(
    name="gemma3_text",
    config=CONFIG,
    gains={"embed_tokens": 0.06, r"model\.norm": 30.0, "gate_proj": 2.0},
    norm_centre=0.0,
    features=(
        Feature(name="global rope scaling", config={"rope_scaling": None}),
        Feature(name="global rope", config={"rope_theta": 100.0}),
        Feature(name="local rope", config={"rope_local_base_freq": 1000.0}),
        Feature(name="pattern", config={"sliding_window_pattern": 2}),
        Feature(name="default pattern", config={"sliding_window_pattern": None}),
        Feature(name="window", config={"sliding_window": 1000}),
        Feature(name="size of the window", config={"sliding_window": 11}),
        Feature(name="scale of scores", config={"query_pre_attn_scalar": 16}),
        Feature(name="scaled embedding", fields={"embedding_scale": 1.0}),
        Feature(name="1 + w", fields={"norm_style": "float32"}),
        Feature(name="tanh GELU", fields={"activation": "gelu"}),
        *(
            Feature(name=name, tensors={name: "zeros"})
            for name in (
                "q_norm",
                "k_norm",
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
                r"model\.norm",
            )
        ),
    ),
)
