"""GPT-2: LayerNorm with bias, learned positions, transposed fused weights, GELU by tanh, tied head; scores divided by the layer."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 0.01,
    "n_ctx": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": 96,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "scale_attn_by_inverse_layer_idx": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "vocab_size": 96,
}

CASE = Case(
    name="gpt2",
    config=CONFIG,
    gains={"wte": 0.15, "wpe": 0.5, "c_fc.weight": 2.0, r"mlp\.c_proj.weight": 3.0, "c_proj.weight": 1.5, r"ln_f\.weight": 20.0},
    is_quick=True,
    features=(
        Feature(name="positions", tensors={"wpe": "zeros"}),
        Feature(name="scores by layer", config={"scale_attn_by_inverse_layer_idx": False}),
        Feature(name="norm eps", config={"layer_norm_epsilon": 1e-5}),
        Feature(name="tanh GELU", fields={"activation": "gelu"}),
        *(
            Feature(name=f"{name} bias", tensors={rf"{name}\.bias": "zeros"})
            for name in ("c_attn", r"attn\.c_proj", "c_fc", r"mlp\.c_proj", "ln_1", "ln_2", "ln_f")
        ),
        *(Feature(name=f"{name} weight", tensors={rf"{name}\.weight": "ones"}) for name in ("ln_1", "ln_2", "ln_f")),
    ),
)
