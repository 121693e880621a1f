"""DeepSeek-V3: sigmoid routing with a correction, within groups by their two best experts; latent attention."""

from __future__ import annotations

from tests.models.case import Case, Feature
from tests.models.cases.deepseek_v2 import CONFIG as V2
from tests.models.cases.deepseek_v2 import GAINS

CONFIG = V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "first_k_dense_replace": 1,
    "n_group": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rope_scaling": V2["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
}

CASE = Case(
    name="deepseek_v3",
    config=CONFIG,
    gains={"e_score_correction": 0.3, **GAINS},
    is_quick=True,
    features=(
        Feature(name="correction", tensors={"e_score_correction_bias": "zeros"}),
        Feature(name="groups", config={"topk_group": 2}),
        Feature(name="renormalisation", config={"norm_topk_prob": False}),
        Feature(name="scaling of routed experts", config={"routed_scaling_factor": 1.0}),
        Feature(name="shared expert", tensors={r"shared_experts\.down_proj": "zeros"}),
        Feature(name="interleaved rotation", config={"rope_interleave": False}),
        Feature(name="norm of the queries' latent", tensors={"q_a_layernorm": "ones"}),
        Feature(name="norm of the latent", tensors={"kv_a_layernorm": "ones"}),
        Feature(name="scale of scores", config={"rope_scaling": CONFIG["rope_scaling"] | {"mscale": 0.0, "mscale_all_dim": 0.0}}),
    ),
)
