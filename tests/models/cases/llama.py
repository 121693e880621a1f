"""Llama with biases everywhere and the default rotation."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.02,
    "rope_theta": 300.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
    "torch_dtype": "float32",
}

CASE = Case(
    name="llama",
    config=CONFIG,
    is_quick=True,
    features=(
        Feature(name="rope theta", config={"rope_theta": 10000.0}),
        Feature(name="norm eps", config={"rms_norm_eps": 1e-6}),
        Feature(name="untied head", config={"tie_word_embeddings": True}),
        Feature(name="input norm", tensors={"input_layernorm": "ones"}),
        Feature(name="second norm", tensors={"post_attention_layernorm": "ones"}),
        Feature(name="last norm", tensors={r"model\.norm": "ones"}),
        *(Feature(name=f"{part} bias", tensors={rf"{part}_proj\.bias": "zeros"}) for part in ("q", "k", "v", "o", "gate", "up", "down")),
        Feature(name="attention biases", config={"attention_bias": False}, tensors={r"self_attn.*bias": "absent"}),
        Feature(name="MLP biases", config={"mlp_bias": False}, tensors={r"mlp.*bias": "absent"}),
    ),
)
