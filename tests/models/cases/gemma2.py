"""Gemma 2: soft caps, norms before and after, a window in every other layer, scaled embedding, 1 + w norms, tanh GELU."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 60.0,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 128,
    "query_pre_attn_scalar": 7,
    "rms_norm_eps": 1e-6,
    "rope_theta": 300.0,
    "sliding_window": 10,
}

CASE = Case(
    name="gemma2",
    config=CONFIG,
    gains={"embed_tokens": 0.06, r"model\.norm": 30.0, "gate_proj": 2.0},
    is_quick=True,
    norm_centre=0.0,
    features=(
        Feature(name="soft cap of scores", fields={"soft_cap": None}),
        Feature(name="soft cap of logits", fields={"logits_soft_cap": None}),
        Feature(name="scale of scores", config={"query_pre_attn_scalar": 16}),
        Feature(name="window", config={"sliding_window": 1000}),
        Feature(name="size of the window", config={"sliding_window": 11}),
        Feature(name="scaled embedding", fields={"embedding_scale": 1.0}),
        Feature(name="1 + w", fields={"norm_style": "float32"}),
        Feature(name="tanh GELU", fields={"activation": "gelu"}),
        *(
            Feature(name=name, tensors={name: "zeros"})
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
                r"model\.norm",
            )
        ),
    ),
)
