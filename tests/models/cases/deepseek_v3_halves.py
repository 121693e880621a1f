"""DeepSeek-V3 with rotated halves instead of neighbours, biases of its projections, and no rope scaling."""

from __future__ import annotations

from tests.models.case import Case, Feature
from tests.models.cases.deepseek_v3 import CONFIG as V3
from tests.models.cases.deepseek_v3 import GAINS

CASE = Case(
    name="deepseek_v3_halves",
    config=V3 | {"attention_bias": True, "norm_topk_prob": False, "rope_interleave": False, "rope_scaling": None},
    gains={"e_score_correction": 0.3, **GAINS},
    prompt_lens=(9, 38),
    features=(
        Feature(name="rotated halves", config={"rope_interleave": True}),
        Feature(name="no renormalisation", config={"norm_topk_prob": True}),
        *(Feature(name=f"bias of {part}", tensors={f"{part}.bias": "zeros"}) for part in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")),
    ),
)
