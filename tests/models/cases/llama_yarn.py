"""YaRN: waves are slowed down by how often they turn within the original context; scores grow with the factor."""

from __future__ import annotations

from tests.models.case import Case, Feature

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 300.0,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1.0,
        "beta_slow": 0.1,
    },
}

CASE = Case(
    name="llama_yarn",
    config=CONFIG,
    gains={"embed_tokens": 0.3},
    prompt_lens=(9, 38),
    features=(
        Feature(name="rope scaling", config={"rope_scaling": None}),
        *(
            Feature(name=key, config={"rope_scaling": CONFIG["rope_scaling"] | {key: value}})
            for key, value in (
                ("factor", 2.0),
                ("original_max_position_embeddings", 48),
                ("beta_fast", 32.0),
                ("beta_slow", 0.4),
                ("attention_factor", 1.0),
                ("truncate", False),
            )
        ),
    ),
)
