"""GGUF metadata -> Hugging Face's config.json and generation_config.json, one function per architecture.

What a file does not state is what llama.cpp's loader takes for that architecture (llama-model.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.checkpoints.gguf_fields import Fields
from jaxinfer.checkpoints.gguf_header import GGUFHeader
from jaxinfer.checkpoints.gguf_rope import ReadTensor, longrope_scaling, rope_scaling
from jaxinfer.errors import CheckpointError, UnsupportedModelError

GEMMA2_LAYERS_27B, GEMMA3_LAYERS_27B = 46, 62
"""llama.cpp knows the sizes of Gemma by their number of layers; only the largest scales queries by hidden size over heads."""
WITHOUT_HEAD_DIM = ("qwen2", "phi3")
"""Their config.json has no `head_dim` as long as it is hidden size over heads."""


def config_from_metadata(header: GGUFHeader, read_tensor: ReadTensor) -> dict[str, Any]:
    """The config.json that the model was converted from, as far as the metadata tells.

    Args:
        read_tensor: reads a tensor by its GGUF name; used for rope factors only.

    Raises:
        CheckpointError: a field is missing or makes no sense.
        UnsupportedModelError: another architecture, or a field whose meaning is not implemented.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"must be a string, got {architecture!r}", file=str(header.path), field="general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {architecture[:60]!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    if header.metadata.get("split.count", 1) != 1:
        raise UnsupportedModelError(
            f"{header.path}: a GGUF split over several files is not supported; merge it with llama-gguf-split --merge"
        )
    fields = Fields(header, architecture)
    sizes = _sizes(fields)
    config: dict[str, Any] = {
        **sizes,
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float32",
        **_special_tokens(header, sizes["vocab_size"]),
        **ARCHITECTURES[architecture](fields, sizes, read_tensor),
    }
    fields.check_all_used()
    if architecture in WITHOUT_HEAD_DIM and config["head_dim"] == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    return config


def _sizes(fields: Fields) -> dict[str, int]:
    header = fields.header
    embed, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    kv_heads = fields.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise fields.fail("attention.head_count_kv", f"{kv_heads} must divide attention.head_count {heads}")
    head_dim = fields.size("attention.key_length", max(embed // heads, 1))
    if head_dim % 2:
        raise fields.fail("attention.key_length", f"head dimension {head_dim} must be even")
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise fields.unsupported("attention.value_length", f"differs from the head dimension {head_dim}: not supported")
    layers = fields.size("block_count")
    if layers > len(header.tensors):
        raise fields.fail("block_count", f"{layers} layers, but the file has {len(header.tensors)} tensors in all")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the tensor is missing or no matrix", file=str(header.path), field="token_embd.weight")
    vocab = fields.size("vocab_size", embedding.shape[0])
    if vocab != embedding.shape[0]:
        raise fields.fail("vocab_size", f"{vocab}, but token_embd.weight has {embedding.shape[0]} rows")
    _check_vocabulary(header, vocab)
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _check_vocabulary(header: GGUFHeader, num_rows: int) -> None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > num_rows:
        raise CheckpointError(
            f"{len(tokens)} tokens, but token_embd.weight has {num_rows} rows", file=str(header.path), field="tokenizer.ggml.tokens"
        )


def _whole_rotation(fields: Fields, sizes: Mapping[str, int]) -> int:
    """The head dimension, all of which is rotated."""
    head_dim = sizes["head_dim"]
    if fields.size("rope.dimension_count", head_dim) != head_dim:
        raise fields.unsupported("rope.dimension_count", f"differs from the head dimension {head_dim}: not supported")
    return head_dim


def _llama(fields: Fields, sizes: Mapping[str, int], read_tensor: ReadTensor) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_scaling": rope_scaling(fields, _whole_rotation(fields, sizes), read_tensor, ("linear", "yarn", "llama3")),
        "attention_bias": _has_biases(fields.header, layers, "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": _has_biases(fields.header, layers, "ffn_gate", "ffn_up", "ffn_down"),
    }


def _qwen2(fields: Fields, sizes: Mapping[str, int], read_tensor: ReadTensor) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rope_scaling": rope_scaling(fields, _whole_rotation(fields, sizes), read_tensor, ("linear", "yarn")),
        "use_sliding_window": False,
    }


def _qwen3(fields: Fields, sizes: Mapping[str, int], read_tensor: ReadTensor) -> dict[str, Any]:
    return {
        **_qwen2(fields, sizes, read_tensor),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
    }


def _gemma2(fields: Fields, sizes: Mapping[str, int], read_tensor: ReadTensor) -> dict[str, Any]:
    rope_scaling(fields, _whole_rotation(fields, sizes), read_tensor, ())  # refuses any
    layers = sizes["num_hidden_layers"]
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": _query_scalar(sizes, GEMMA2_LAYERS_27B),
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "attn_logit_softcapping": fields.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.real("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: Fields, sizes: Mapping[str, int], read_tensor: ReadTensor) -> dict[str, Any]:
    cap = fields.get("final_logit_softcapping")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": _query_scalar(sizes, GEMMA3_LAYERS_27B),
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": _gemma3_layer_types(fields, sizes["num_hidden_layers"]),
        "rope_theta": fields.real("rope.freq_base", 1e6),
        "rope_local_base_freq": fields.real("rope.freq_base_swa", 10000.0),
        "rope_scaling": rope_scaling(fields, _whole_rotation(fields, sizes), read_tensor, ("linear",)),
        "final_logit_softcapping": None if cap is None else fields.real("final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def _query_scalar(sizes: Mapping[str, int], layers_of_largest: int) -> int:
    if sizes["num_hidden_layers"] == layers_of_largest:
        return sizes["hidden_size"] // sizes["num_attention_heads"]
    return sizes["head_dim"]


def _gemma3_layer_types(fields: Fields, layers: int) -> list[str]:
    """Every sixth layer sees everything, unless the file says otherwise: another period, or a flag per layer."""
    key = "attention.sliding_window_pattern"
    flags = fields.get(key)
    if not (isinstance(flags, list) and all(isinstance(flag, bool) for flag in flags)):
        period = fields.size(key, 6)
        flags = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(flags) != layers:
        raise fields.fail(key, f"must have a flag for each of {layers} layers, got {len(flags)}")
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _phi3(fields: Fields, sizes: Mapping[str, int], read_tensor: ReadTensor) -> dict[str, Any]:
    head_dim = sizes["head_dim"]
    rotated = fields.size("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise fields.fail("rope.dimension_count", f"must be even and at most the head dimension {head_dim}, got {rotated}")
    original = fields.size("rope.scaling.original_context_length", fields.size("context_length"))
    partial = {} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        **partial,
        "original_max_position_embeddings": original,
        "rope_scaling": longrope_scaling(fields, rotated, read_tensor, original),
        "sliding_window": fields.optional_size("attention.sliding_window"),
    }


ARCHITECTURES: Mapping[str, Callable[[Fields, Mapping[str, int], ReadTensor], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


def _has_biases(header: GGUFHeader, layers: int, *parts: str) -> bool:
    """Whether the projections have biases; Llama has them in all of `parts` or in none."""
    present = sum(f"blk.{layer}.{part}.bias" in header.tensors for layer in range(layers) for part in parts)
    if present not in (0, layers * len(parts)):
        raise UnsupportedModelError(f"{header.path}: biases on some of {', '.join(parts)} only are not supported")
    return present > 0


def _special_tokens(header: GGUFHeader, num_tokens: int) -> dict[str, Any]:
    keys = (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id"))
    return {name: _token_id(header, key, num_tokens) for key, name in keys}


def _token_id(header: GGUFHeader, key: str, num_tokens: int) -> int | None:
    field = f"tokenizer.ggml.{key}_token_id"
    value = header.metadata.get(field)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens):
        raise CheckpointError(f"must be a token id from 0 to {num_tokens - 1}, got {str(value)[:60]}", file=str(header.path), field=field)
    return value


def generation_config_from_metadata(header: GGUFHeader, num_tokens: int) -> dict[str, Any]:
    """generation_config.json: the special tokens; `eos_token_id` is a list where the end of a turn is another token.

    Raises:
        CheckpointError: a special token is not one of the `num_tokens`.
    """
    config = {name: value for name, value in _special_tokens(header, num_tokens).items() if value is not None}
    end_of_turn = _token_id(header, "eot", num_tokens)
    if end_of_turn is not None and end_of_turn != config.get("eos_token_id", end_of_turn):
        config["eos_token_id"] = [config["eos_token_id"], end_of_turn]
    return config
