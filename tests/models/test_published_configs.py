"""config.json of popular checkpoints, with every attribute as published with the model, is accepted and means what it should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.checkpoints.prequantized import unpack_quantized
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.errors import UnsupportedModelError
from jaxinfer.models.config import find

FILE = "folder/config.json"


def published(model_type: str, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    """`sizes`: vocabulary, hidden, intermediate, layers, heads, key-value heads, context."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    common = {
        "architectures": ["SomethingForCausalLM"],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.0",
        "use_cache": True,
    }
    return common | dict(zip((*names, "max_position_embeddings"), sizes, strict=True)) | others


def llama(sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    return published("llama", sizes, **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None} | others)


def gemma2(sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"}
    activations = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    rest = {"attention_bias": False, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096}
    result = published("gemma2", sizes, **caps, **activations, **rest, **others)
    del result["tie_word_embeddings"]
    return result


def phi3(sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    remote = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    rest = {"attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096}
    return published("phi3", sizes, **{"auto_map": remote, "rope_theta": 10000.0, "rope_scaling": None, **rest} | others)


def qwen3_moe(sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    training = {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001}
    rest = {"head_dim": 128, "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None}
    return published("qwen3_moe", sizes, **{**experts, **training, **rest, "rms_norm_eps": 1e-06} | others)


def deepseek(model_type: str, sizes: tuple[int, ...], mscale: float, **others: Any) -> dict[str, Any]:
    yarn = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": mscale, "mscale_all_dim": mscale, "type": "yarn"}
    heads = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False}
    rest = {"auto_map": {"AutoModel": "modeling_deepseek.Model"}, "moe_layer_freq": 1, "rms_norm_eps": 1e-06, "rope_theta": 10000}
    rope = {"rope_scaling": {**yarn, "original_max_position_embeddings": 4096}}
    return published(model_type, sizes, **heads, **rest, **rope, **others)


def gpt_oss(num_layers: int, num_experts: int) -> dict[str, Any]:
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0}
    training = {"output_router_logits": False, "router_aux_loss_coef": 0.9, "initial_context_length": 4096}
    windows = {"layer_types": ["sliding_attention", "full_attention"] * (num_layers // 2), "sliding_window": 128}
    rope = {"rope_scaling": {**yarn, "truncate": False}, "rope_theta": 150000, "head_dim": 64, "attention_bias": True}
    return published("gpt_oss", (201088, 2880, 2880, num_layers, 64, 8, 131072), **experts, **training, **windows, **rope)


def gpt2(**others: Any) -> dict[str, Any]:
    sizes = {"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    dropout = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05}
    summary = {"activation": None, "first_dropout": 0.1, "proj_to_labels": True, "type": "cls_index", "use_proj": True}
    tasks = {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    common = {"model_type": "gpt2", "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "eos_token_id": 50256}
    return common | sizes | dropout | {f"summary_{name}": value for name, value in summary.items()} | tasks | others


def llama3(factor: float) -> dict[str, Any]:
    shape = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    return {"rope_theta": 500000.0, "rope_scaling": {"factor": factor, "rope_type": "llama3", **shape}}


def longrope(half: int) -> dict[str, Any]:
    """The published factors differ from pair to pair; how many there are is what counts here."""
    return {"rope_scaling": {"long_factor": [2.0] * half, "short_factor": [1.0] * half, "type": "longrope"}}


QWEN2 = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "max_window_layers": 28, "use_sliding_window": False}
QWEN3 = QWEN2 | {"attention_bias": False, "head_dim": 128, "sliding_window": None, "rope_scaling": None}
QWEN25_7B = (152064, 3584, 18944, 28, 28, 4, 32768)
GRANITE = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "rope_scaling": None, "attention_dropout": 0.1}
GRANITE |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
GEMMA3 = {"attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid"}
GEMMA3 |= {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06}
GEMMA3 |= {"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "pad_token_id": 0}
V3 = {"q_lora_rank": 1536, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
V3 |= {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "ep_size": 1}
V3 |= {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5}
V2_LITE = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax"}
V2_LITE |= {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
V2_LITE |= {"norm_topk_prob": False, "aux_loss_alpha": 0.001, "seq_aux": True, "first_k_dense_replace": 1, "pretraining_tp": 1}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02}
# What transformers 4 wrote of a whole configuration, `to_dict` instead of the difference to the defaults.
WHOLE = {"max_length": 20, "min_length": 0, "num_beams": 1, "num_beam_groups": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
WHOLE |= {"typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "num_return_sequences": 1, "do_sample": False}
WHOLE |= {"pruned_heads": {}, "tokenizer_class": "LlamaTokenizer", "id2label": {"0": "LABEL_0"}, "_attn_implementation_autoset": True}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama-1-7B": (
        llama((32000, 4096, 11008, 32, 32, 32, 2048), rms_norm_eps=1e-06, max_sequence_length=2048),
        {"rope": (10_000.0, 128, None), "max_positions": 2048},
    ),
    "Llama-2-7b-hf": (llama((32000, 4096, 11008, 32, 32, 32, 4096)), {"rope": (10_000.0, 128, None), "is_tied": False}),
    "Llama-3.1-8B and DeepSeek-R1-Distill-Llama-8B": (
        llama((128256, 4096, 14336, 32, 32, 8, 131072), **llama3(8.0)),
        {"rope": (500_000.0, 128, ("Llama3Scaling", 8.0)), "max_positions": 131072, "has_qkv_bias": False, "windows": (None,)},
    ),
    "Llama-3.2-1B": (
        llama((128256, 2048, 8192, 16, 32, 8, 131072), head_dim=64, tie_word_embeddings=True, **llama3(32.0)),
        {"rope": (500_000.0, 64, ("Llama3Scaling", 32.0)), "is_tied": True, "head_dim": 64},
    ),
    "SmolLM2-1.7B": (
        llama((49152, 2048, 8192, 24, 32, 32, 8192), rope_theta=130000, tie_word_embeddings=True, pad_token_id=2)
        | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        {"rope": (130_000.0, 64, None), "is_tied": True},
    ),
    "TinyLlama-1.1B": (llama((32000, 2048, 5632, 22, 32, 4, 2048)), {"rope": (10_000.0, 64, None)}),
    "Yi-6B": (llama((64000, 4096, 11008, 32, 32, 4, 4096), rope_theta=5000000.0), {"rope": (5_000_000.0, 128, None)}),
    "Mistral-7B-v0.1": (
        published("mistral", (32000, 4096, 14336, 32, 32, 8, 32768), sliding_window=4096, rope_theta=10000.0),
        {"windows": (4096,), "rope": (10_000.0, 128, None)},
    ),
    "Mistral-7B-Instruct-v0.3": (
        published("mistral", (32768, 4096, 14336, 32, 32, 8, 32768), sliding_window=None, rope_theta=1000000.0, **WHOLE),
        {"windows": (None,), "rope": (1_000_000.0, 128, None)},
    ),
    "Mistral-Nemo-Base-2407": (
        published("mistral", (131072, 5120, 14336, 40, 32, 8, 128000), sliding_window=None, rope_theta=1000000.0, head_dim=128),
        {"windows": (None,), "head_dim": 128, "max_positions": 128000},
    ),
    "Mixtral-8x7B-v0.1": (
        published("mixtral", (32000, 4096, 14336, 32, 32, 8, 32768), sliding_window=None, rope_theta=1000000.0, **MIXTRAL),
        {"windows": (None,), "num_experts": 8, "expert_size": 14336, "num_chosen": 2},
    ),
    "Qwen2.5-0.5B": (
        published("qwen2", (151936, 896, 4864, 24, 14, 2, 32768), **QWEN2 | {"max_window_layers": 24, "tie_word_embeddings": True})
        | {"sliding_window": 32768, "use_mrope": False},
        {"windows": (None,), "has_qkv_bias": True, "has_out_bias": False, "is_tied": True, "rope": (1_000_000.0, 64, None)},
    ),
    "Qwen2.5-7B-Instruct": (
        published("qwen2", QWEN25_7B, sliding_window=131072, **QWEN2),
        {"windows": (None,), "max_positions": 32768, "is_tied": False},
    ),
    "Qwen2.5-7B-Instruct, YaRN as its card says": (
        published("qwen2", QWEN25_7B, sliding_window=131072, **QWEN2)
        | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        {"rope": (1_000_000.0, 128, ("YarnScaling", 4.0)), "max_positions": 131072},
    ),
    "Qwen2.5-7B-Instruct-1M": (
        published("qwen2", (*QWEN25_7B[:6], 1010000), sliding_window=1010000, **QWEN2 | {"rope_theta": 10000000.0})
        | {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}},
        {"windows": (None,), "max_positions": 262144, "rope": (10_000_000.0, 128, None)},
    ),
    "DeepSeek-R1-Distill-Qwen-7B": (
        published("qwen2", (152064, 3584, 18944, 28, 28, 4, 131072), sliding_window=4096, use_mrope=False, **QWEN2 | {"rope_theta": 10000}),
        {"windows": (None,), "rope": (10_000.0, 128, None)},
    ),
    "Qwen3-0.6B": (
        published("qwen3", (151936, 1024, 3072, 28, 16, 8, 40960), **QWEN3 | {"rope_theta": 1000000, "tie_word_embeddings": True}),
        {"qk_norm": "head", "head_dim": 128, "has_qkv_bias": False, "windows": (None,), "max_positions": 40960},
    ),
    "Qwen3-8B": (
        published("qwen3", (151936, 4096, 12288, 36, 32, 8, 40960), **QWEN3 | {"max_window_layers": 36}),
        {"qk_norm": "head", "is_tied": False},
    ),
    "Qwen3-30B-A3B": (
        qwen3_moe((151936, 2048, 6144, 48, 32, 4, 40960), attention_bias=False, rope_theta=1000000.0),
        {"num_experts": 128, "expert_size": 768, "num_chosen": 8, "is_renormalized": True, "dense_layers": frozenset()},
    ),
    "Qwen3-Coder-30B-A3B-Instruct": (
        qwen3_moe((151936, 2048, 6144, 48, 32, 4, 262144), rope_theta=10000000, router_aux_loss_coef=0.0)
        | {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0},
        {"num_experts": 128, "qk_norm": "head", "rope": (10_000_000.0, 128, None)},
    ),
    "OLMo-2-1124-7B": (
        published("olmo2", (100352, 4096, 11008, 32, 32, 32, 4096), attention_bias=False, rope_theta=500000, rope_scaling=None)
        | {"rms_norm_eps": 1e-06, "pad_token_id": 100277},
        {"qk_norm": "all", "norms": "after", "rope": (500_000.0, 128, None)},
    ),
    "granite-3.0-8b-instruct": (
        published("granite", (49155, 4096, 12800, 40, 32, 8, 4096), **GRANITE)
        | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0, "rope_theta": 10000},
        {"attention_scale": 0.0078125, "logits_scale": 1 / 16, "embedding_scale": 12.0, "residual_scale": 0.22, "is_tied": True},
    ),
    "granite-3.3-2b-instruct": (
        published("granite", (49159, 2048, 8192, 40, 32, 8, 131072), **GRANITE)
        | {"attention_multiplier": 0.015625, "logits_scaling": 8.0, "rope_theta": 10000000.0},
        {"attention_scale": 0.015625, "logits_scale": 1 / 8, "rope": (10_000_000.0, 64, None)},
    ),
    "gemma-2-2b": (
        gemma2((256000, 2304, 9216, 26, 8, 4, 8192), head_dim=256, query_pre_attn_scalar=256),
        {"windows": (None, 4096), "attention_scale": 1 / 16, "soft_cap": 50.0, "logits_soft_cap": 30.0, "is_tied": True},
    ),
    "gemma-2-9b": (
        gemma2((256000, 3584, 14336, 42, 16, 8, 8192), head_dim=256, query_pre_attn_scalar=256, sliding_window_size=4096),
        {"windows": (None, 4096), "attention_scale": 1 / 16, "embedding_scale": 3584**0.5},
    ),
    "gemma-2-27b": (
        gemma2((256000, 4608, 36864, 46, 32, 16, 8192), head_dim=128, query_pre_attn_scalar=144, sliding_window_size=4096),
        {"first_windows": (4096, None) * 3 + (4096,), "attention_scale": 1 / 12, "head_dim": 128},
    ),
    "gemma-3-1b-it": (
        published("gemma3_text", (262144, 1152, 6912, 26, 4, 1, 32768), sliding_window_pattern=6, **GEMMA3)
        | {"hidden_act": None, "tie_word_embeddings": None},
        {"first_windows": (512, 512, 512, 512, 512, None, 512), "thetas": (1_000_000.0, 10_000.0), "soft_cap": None, "is_tied": True},
    ),
    "gemma-3-270m": (
        published("gemma3_text", (262144, 640, 2048, 18, 4, 1, 32768), _sliding_window_pattern=6, **GEMMA3)
        | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "use_bidirectional_attention": False}
        | {"hidden_act": None, "tie_word_embeddings": None},
        {"first_windows": (512, 512, 512, 512, 512, None, 512), "qk_norm": "head"},
    ),
    "Phi-3-mini-4k-instruct": (
        phi3((32064, 3072, 8192, 32, 32, 32, 4096), sliding_window=2047),
        {"windows": (2047,), "rope": (10_000.0, 96, None), "is_fused": True},
    ),
    "Phi-3-mini-128k-instruct and Phi-3.5-mini-instruct": (
        phi3((32064, 3072, 8192, 32, 32, 32, 131072), sliding_window=262144, **longrope(48)),
        {"windows": (262144,), "rope": (10_000.0, 96, ("LongRopeScaling", (1 + 5 / 12) ** 0.5)), "max_positions": 131072},
    ),
    "Phi-4-mini-instruct": (
        phi3((200064, 3072, 8192, 32, 24, 8, 131072), sliding_window=262144, partial_rotary_factor=0.75, **longrope(48))
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        {"rope": (10_000.0, 96, ("LongRopeScaling", (1 + 5 / 12) ** 0.5)), "head_dim": 128, "is_tied": True},
    ),
    "phi-4": (
        phi3((100352, 5120, 17920, 40, 40, 10, 16384), rope_theta=250000.0, original_max_position_embeddings=16384)
        | {"sliding_window": None},
        {"windows": (None,), "rope": (250_000.0, 128, None), "is_tied": False},
    ),
    "gpt2": (gpt2(), {"max_positions": 1024, "hidden_size": 3072}),
    "gpt2-medium": (gpt2(n_embd=1024, n_head=16, n_layer=24, n_special=0, predict_special_tokens=True), {"hidden_size": 4096}),
    "gpt2-xl": (gpt2(n_embd=1600, n_head=25, n_layer=48, output_past=True), {"num_layers": 48}),
    "distilgpt2": (gpt2(n_layer=6, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}), {"num_layers": 6}),
    "DeepSeek-V2-Lite": (
        deepseek("deepseek_v2", (102400, 2048, 10944, 27, 16, 16, 163840), 0.707, **V2_LITE, routed_scaling_factor=1.0),
        {"num_experts": 64, "num_chosen": 6, "shared_size": 2816, "dense_layers": frozenset([0]), "rope": (1e4, 64, ("YarnScaling", 40.0))},
    ),
    "DeepSeek-V3 and R1": (
        deepseek("deepseek_v3", (129280, 7168, 18432, 61, 128, 128, 163840), 1.0, **V3),
        {"num_experts": 256, "num_chosen": 8, "dense_layers": frozenset(range(3)), "unused_tensors": ("model.layers.61.",)},
    ),
    "gpt-oss-20b": (
        gpt_oss(24, 32),
        {"first_windows": (128, None) * 3 + (128,), "num_experts": 32, "has_sinks": True, "rope": (150_000.0, 64, ("YarnScaling", 32.0))},
    ),
    "gpt-oss-120b": (gpt_oss(36, 128), {"num_experts": 128, "num_chosen": 4, "has_qkv_bias": True, "max_positions": 131072}),
}


def read(config: Mapping[str, Any]) -> Any:
    return find(config, FILE).Config.from_hf(config, FILE)


def fact(config: Any, name: str) -> Any:
    """A field of a model's configuration, or of what is inside."""
    if name == "first_windows":
        return tuple(layer.window for layer in config.layers)[:7]
    if name == "thetas":
        return tuple(rope.theta for rope in config.ropes)
    if name == "rope":
        scaling = config.ropes[0].scaling
        number = None if scaling is None else getattr(scaling, "factor", None) or scaling.magnitude
        return (config.ropes[0].theta, config.ropes[0].size, scaling and (type(scaling).__name__, pytest.approx(number)))
    return getattr(config.routing if name in ("num_chosen", "is_renormalized") else config, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read(name: str) -> None:
    config, expected = CONFIGS[name]
    result = read(config)
    assert {field: fact(result, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("SmolLM2-1.7B", {"rope_interleaved": True}, "rope_interleaved"),
        ("gemma-2-9b", {"sliding_window_size": 2048}, "sliding_window_size"),
        ("Qwen3-Coder-30B-A3B-Instruct", {"use_qk_norm": False}, "use_qk_norm"),
        ("Qwen3-Coder-30B-A3B-Instruct", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        ("Qwen2.5-7B-Instruct", {"is_causal": False}, "is_causal"),
        (
            "Qwen2.5-7B-Instruct-1M",
            {"dual_chunk_attention_config": {"chunk_size": 8, "sparse_attention_enabled": True}},
            "sparse_attention",
        ),
        ("gemma-3-1b-it", {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "gemma3_text"),
    ],
)
def test_what_would_change_the_result_is_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read(CONFIGS[name][0] | changes)


# ---- quantized ones: one matrix of 256 x 256 stands for all -----------------------------------------------------------------

STEM = "model.layers.0.mlp.up_proj"
PER_GROUP = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4, "observer": "minmax"}
PER_GROUP |= {"observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"}
PER_CHANNEL = PER_GROUP | {"group_size": None, "num_bits": 8, "strategy": "channel"}
FLOAT8 = PER_CHANNEL | {"strategy": "tensor", "type": "float"}
PER_TOKEN = PER_CHANNEL | {"dynamic": True, "observer": "memoryless", "strategy": "token"}
GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True, "true_sequential": True}
GPTQ |= {"model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq"}


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None, status: str = "compressed") -> dict[str, Any]:
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    sparsity = {"format": "dense", "global_sparsity": 0.14, "ignore": [], "registry_requires_subclass": False}
    sparsity |= {"sparsity_structure": "unstructured", "targets": []}
    settings = {"config_groups": {"group_0": group}, "format": kind, "global_compression_ratio": 1.5, "ignore": ["lm_head"]}
    settings |= {"kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": status}
    return settings | {"sparsity_config": sparsity}


def gptq_tensors() -> dict[str, np.ndarray]:
    words = {"qweight": np.zeros((32, 256), np.int32), "qzeros": np.zeros((2, 32), np.int32)}
    return words | {"scales": np.ones((2, 256), np.float16), "g_idx": (np.arange(256) // 128).astype(np.int32)}


def zeros(dtype: Any) -> np.ndarray:
    return np.zeros((256, 256), dtype)


ONE, FP8 = np.ones(1, ml_dtypes.bfloat16), zeros(ml_dtypes.float8_e4m3fn)
AWQ_TENSORS = gptq_tensors() | {"qweight": np.zeros((256, 32), np.int32)}
del AWQ_TENSORS["g_idx"]
W4A16_TENSORS = {
    "weight_packed": AWQ_TENSORS["qweight"],
    "weight_shape": np.array([256, 256]),
    "weight_scale": np.ones((256, 2), np.float16),
}
W8A8_TENSORS = {"weight": zeros(np.int8), "weight_scale": np.ones((256, 1), ml_dtypes.bfloat16)}
STATIC_FP8_TENSORS = {"weight": FP8, "weight_scale": ONE, "input_scale": ONE}
BLOCK_FP8_TENSORS = {"weight": FP8, "weight_scale_inv": np.ones((2, 2), np.float32)}

V3_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "Llama-2-7B-GPTQ": (GPTQ, gptq_tensors()),
    "Llama-3.1-8B-Instruct-w4a16 of AutoGPTQ, in order though desc_act": (
        GPTQ | {"desc_act": True, "static_groups": True, "checkpoint_format": "gptq"},
        gptq_tensors(),
    ),
    "Qwen2.5-7B-Instruct-AWQ": (
        {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm", "zero_point": True},
        AWQ_TENSORS,
    ),
    "Qwen2.5-7B-Instruct-quantized.w4a16": (compressed("pack-quantized", PER_GROUP | {"actorder": "weight"}, None), W4A16_TENSORS),
    "Llama-3.1-8B-Instruct-quantized.w8a8": (compressed("int-quantized", PER_CHANNEL, PER_TOKEN), W8A8_TENSORS),
    "w8a8 with fixed scales of activations": (
        compressed("int-quantized", PER_CHANNEL, PER_CHANNEL | {"strategy": "tensor"}, "frozen"),
        W8A8_TENSORS | {"input_scale": np.ones(1, np.float32), "input_zero_point": np.zeros(1, np.int8)},
    ),
    "Meta-Llama-3.1-8B-Instruct-FP8": (compressed("float-quantized", FLOAT8, FLOAT8, "frozen"), STATIC_FP8_TENSORS),
    "Meta-Llama-3-8B-Instruct-FP8": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        STATIC_FP8_TENSORS,
    ),
    "DeepSeek-V3": (V3_FP8, BLOCK_FP8_TENSORS),
    "DeepSeek-V3.1": (V3_FP8 | {"scale_fmt": "ue8m0"}, BLOCK_FP8_TENSORS),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_published_quantization_is_kept_packed(name: str) -> None:
    settings, stored = QUANTIZED[name]
    tensors = {
        f"{STEM}.{suffix}": LazyTensor(values.shape, values.dtype.name, lambda values=values: values) for suffix, values in stored.items()
    }
    _, plain = unpack_quantized({"quantization_config": settings}, tensors, "model")
    assert set(plain) == {f"{STEM}.weight"}
    matrix = plain[f"{STEM}.weight"]
    assert matrix.packed is not None and matrix.shape == (256, 256)
