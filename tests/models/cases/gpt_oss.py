"""gpt_oss: sinks, a window in every other layer, biases everywhere, experts with a clamped SwiGLU, YaRN.

The experts' weights are multiples that mxfp4 holds exactly, so that the same golden serves for a checkpoint stored so.
"""

from __future__ import annotations

import numpy as np

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "experts_per_token": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "initial_context_length": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 3.0,
        "beta_slow": 0.2,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 300.0,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 8,
    "swiglu_limit": 2.0,
    "tie_word_embeddings": False,
}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""What four bits say but for the sign (OCP Microscaling Formats 1.0, 5.3.3)."""
BLOCK = 32
"""Inputs that share a power of two."""


def exponents(inputs_last: np.ndarray) -> np.ndarray:
    """The power of two of each block [..., blocks, 32] -> [..., blocks], such that its largest number is 4 or 6 times it at most."""
    largest = np.abs(inputs_last).max(axis=-1)
    return np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 2


def rounded(name: str, tensor: np.ndarray) -> np.ndarray:
    """Experts [X in out] to what mxfp4 can say; other tensors as they are."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return tensor
    inputs_last = tensor.swapaxes(1, 2)
    blocks = inputs_last.reshape(*inputs_last.shape[:2], -1, BLOCK)
    scales = np.exp2(exponents(blocks))[..., None]
    nearest = MAGNITUDES[np.abs(np.abs(blocks / scales)[..., None] - MAGNITUDES).argmin(axis=-1)]
    return (np.sign(blocks) * nearest * scales).reshape(inputs_last.shape).swapaxes(1, 2)


CASE = Case(
    name="gpt_oss",
    config=CONFIG,
    gains={r"router\.weight": 1.5, r"experts\.\w+_bias": 4.0, r"experts\.": 1.5},
    stacked=r"experts\.(gate_up|down)_proj$",
    rounded=rounded,
    is_quick=True,
    features=(
        Feature(name="sinks", fields={"has_sinks": False}, tensors={"sinks": "absent"}),
        Feature(name="window", config={"sliding_window": 1000}),
        Feature(name="size of the window", config={"sliding_window": 9}),
        Feature(name="which layers have it", config={"layer_types": ["full_attention", "sliding_attention"]}),
        Feature(name="clamp", config={"swiglu_limit": 1000.0}),
        Feature(name="slope of the gate", fields={"gating": {"alpha": 1.0}}),
        Feature(name="number of experts", config={"num_experts_per_tok": 1}),
        Feature(name="rope scaling", config={"rope_scaling": {"rope_type": "default"}}),
        Feature(name="truncation", config={"rope_scaling": CONFIG["rope_scaling"] | {"truncate": True}}),
        *(
            Feature(name=f"bias of {part}", tensors={part: "zeros"})
            for part in ("gate_up_proj_bias", "down_proj_bias", r"router\.bias", r"q_proj\.bias", r"v_proj\.bias", r"o_proj\.bias")
        ),
    ),
)
