"""DeepSeek-V2-Lite: queries straight from the residual stream, experts chosen freely."""

from __future__ import annotations

from tests.models.case import Case, Feature
from tests.models.cases.deepseek_v2 import CONFIG as V2
from tests.models.cases.deepseek_v2 import GAINS

CONFIG = V2 | {
    "n_group": 1,
    "q_lora_rank": None,
    "rope_scaling": V2["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 32,
}

CASE = Case(
    name="deepseek_v2_lite",
    config=CONFIG,
    gains=GAINS,
    prompt_lens=(9, 38),
    features=(
        Feature(name="number of experts", config={"num_experts_per_tok": 2}),
        Feature(name="scale of scores", config={"rope_scaling": CONFIG["rope_scaling"] | {"mscale": 0.0, "mscale_all_dim": 0.0}}),
    ),
)
