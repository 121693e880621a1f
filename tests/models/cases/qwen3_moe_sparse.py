"""Qwen3-MoE with experts in every second layer and probabilities as they are."""

from __future__ import annotations

from tests.models.case import Case, Feature
from tests.models.cases.qwen3_moe import CONFIG

CASE = Case(
    name="qwen3_moe_sparse",
    config=CONFIG
    | {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False, "attention_bias": True, "num_hidden_layers": 2},
    gains={r"mlp\.gate\.": 1.5, r"experts\.": 2.0},
    prompt_lens=(9, 38),
    features=(
        Feature(name="no renormalisation", config={"norm_topk_prob": True}),
        *(Feature(name=f"bias of {part}", tensors={f"{part}_proj.bias": "zeros"}) for part in "qvo"),
    ),
)
