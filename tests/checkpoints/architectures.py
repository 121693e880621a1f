"""Tiny models of every GGUF architecture: metadata, Hugging Face's tensors, and the config.json that must come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.checkpoints.checkpoint_files import write_any_gguf

VOCAB, EMBED, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 64, 7, 4, 2, 16
QUERIES, KEYS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
COMMON = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": EMBED,
    "feed_forward_length": MLP,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
HEAD_FIELDS = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
COMMON_CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ATTENTION = {
    "self_attn.q_proj.weight": (QUERIES, EMBED),
    "self_attn.k_proj.weight": (KEYS, EMBED),
    "self_attn.v_proj.weight": (KEYS, EMBED),
    "self_attn.o_proj.weight": (EMBED, QUERIES),
}
MLP_SHAPES = {"mlp.gate_proj.weight": (MLP, EMBED), "mlp.up_proj.weight": (MLP, EMBED), "mlp.down_proj.weight": (EMBED, MLP)}
NORMS = {"input_layernorm.weight": (EMBED,), "post_attention_layernorm.weight": (EMBED,)}
GEMMA_NORMS = {**NORMS, "pre_feedforward_layernorm.weight": (EMBED,), "post_feedforward_layernorm.weight": (EMBED,)}
QK_NORMS = {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
HALF = EMBED // HEADS  # the head dimension where the file gives none


@dataclass(frozen=True, slots=True)
class Case:
    """One architecture. `layer` has Hugging Face's names within a layer; `config` is what a reader must make of it."""

    architecture: str
    metadata: Mapping[str, Any]
    layer: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    is_tied: bool = False
    is_offset: bool = False

    def tensors(self) -> dict[str, np.ndarray]:
        """Random float32 weights under Hugging Face's names."""
        rng = np.random.default_rng(7)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
        if not self.is_tied:
            shapes["lm_head.weight"] = (VOCAB, EMBED)
        for layer in range(LAYERS):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self.layer.items()}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def gguf_tensors(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As llama.cpp's converter stores them: the names by gguf's own table, Gemma's norms with one added."""
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = gguf.get_tensor_name_map(arch, LAYERS)
        stored = {}
        for name, tensor in tensors.items():
            stem, _, suffix = name.rpartition(".")
            new = names.get_name(stem)
            assert new is not None, name
            stored[f"{new}.{suffix}"] = tensor + np.float32(1) if self.is_offset and name.endswith("norm.weight") else tensor
        return stored

    def write(self, path: Path, extra: Mapping[str, Any] | None = None, more: Mapping[str, np.ndarray] | None = None) -> Path:
        """Write the file, with fields changed (None: left out) and tensors added."""
        fields = {**COMMON, **self.metadata, **(extra or {})}
        metadata = {f"{self.architecture}.{key}": value for key, value in fields.items()} | {"tokenizer.ggml.eos_token_id": 1}
        return write_any_gguf(path, self.architecture, metadata, {**self.gguf_tensors(self.tensors()), **(more or {})})


QWEN2 = Case(
    architecture="qwen2",
    metadata={"rope.freq_base": 1e6},
    layer={
        **NORMS,
        **MLP_SHAPES,
        "self_attn.q_proj.weight": (EMBED, EMBED),
        "self_attn.q_proj.bias": (EMBED,),
        "self_attn.k_proj.weight": (KV_HEADS * HALF, EMBED),
        "self_attn.k_proj.bias": (KV_HEADS * HALF,),
        "self_attn.v_proj.weight": (KV_HEADS * HALF, EMBED),
        "self_attn.v_proj.bias": (KV_HEADS * HALF,),
        "self_attn.o_proj.weight": (EMBED, EMBED),
    },
    config={
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "rope_scaling": None,
        "use_sliding_window": False,
    },
)
QWEN3 = Case(
    architecture="qwen3",
    metadata={**HEAD_FIELDS, "rope.freq_base": 1e6},
    layer={**NORMS, **MLP_SHAPES, **ATTENTION, **QK_NORMS},
    config={
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "head_dim": HEAD_DIM,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "use_sliding_window": False,
        "attention_bias": False,
    },
    is_tied=True,
)
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA2 = Case(
    architecture="gemma2",
    metadata={**HEAD_FIELDS, "attention.sliding_window": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    layer={**GEMMA_NORMS, **MLP_SHAPES, **ATTENTION},
    config={
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 24,
        "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL, SLIDING],
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    is_tied=True,
    is_offset=True,
)
GEMMA3 = Case(
    architecture="gemma3",
    metadata={**HEAD_FIELDS, "rope.freq_base": 1e6, "attention.sliding_window": 24},
    layer={**GEMMA_NORMS, **MLP_SHAPES, **ATTENTION, **QK_NORMS},
    config={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 24,
        "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    is_tied=True,
    is_offset=True,
)
PHI3 = Case(
    architecture="phi3",
    metadata={"rope.dimension_count": HALF, "rope.scaling.original_context_length": 64, "attention.sliding_window": 100},
    layer={
        **NORMS,
        "self_attn.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * HALF, EMBED),
        "self_attn.o_proj.weight": (EMBED, EMBED),
        "mlp.gate_up_proj.weight": (2 * MLP, EMBED),
        "mlp.down_proj.weight": (EMBED, MLP),
    },
    config={
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "original_max_position_embeddings": 64,
        "rope_scaling": None,
        "sliding_window": 100,
    },
)
CASES = (QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3)
