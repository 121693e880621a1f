"""GGUF metadata of architecture `llama` -> Hugging Face's config.json and generation_config.json.

Strict: a `llama.*` field that is neither used nor known to be harmless raises, since it may change the formula.
Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `Keys` in gguf.constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.checkpoints.gguf_header import GGUFHeader
from jaxinfer.errors import CheckpointError, UnsupportedModelError

SUPPORTED_ARCHITECTURES = ("llama",)
IGNORED_KEYS = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.attn_factor"})
"""Fields that change nothing for the variants accepted here (the last only matters to yarn, which is refused)."""
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""The only parameters that Llama 3.1 and 3.2 were released with; a GGUF keeps just the factors they give."""
MAX_SIZE = 2**31 - 1
MIN_REAL, MAX_REAL = 1e-30, 1e30


class _Fields:
    """Typed access to the metadata of one architecture; remembers which fields were used."""

    def __init__(self, header: GGUFHeader, architecture: str):
        self.header, self.prefix = header, architecture + "."
        self.used: set[str] = set()

    def fail(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(message, file=str(self.header.path), field=self.prefix + key)

    def get(self, key: str) -> Any:
        self.used.add(key)
        return self.header.metadata.get(self.prefix + key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.fail(key, "the field is missing")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # some writers repeat a value for each layer
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_SIZE:
            raise self.fail(key, f"must be an integer from 1 to {MAX_SIZE}, got {str(value)[:60]}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal that is the same float32 (1e-05, not 9.99999974e-06)."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.fail(key, "the field is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_REAL <= value <= MAX_REAL:
            raise self.fail(key, f"must be a number from {MIN_REAL} to {MAX_REAL}, got {str(value)[:60]}")
        return float(str(np.float32(value)))

    def check_all_used(self) -> None:
        for key in self.header.metadata:
            name = key.removeprefix(self.prefix)
            if name != key and name not in self.used and name not in IGNORED_KEYS:
                raise UnsupportedModelError(
                    f"{self.header.path}: metadata field {key!r} ({str(self.header.metadata[key])[:60]}) is not supported"
                )


def config_from_metadata(header: GGUFHeader, read_tensor: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """The config.json that the model was converted from, as far as the metadata tells.

    Args:
        read_tensor: reads a tensor by its GGUF name; used for `rope_freqs.weight` only.

    Raises:
        CheckpointError: a field is missing or makes no sense.
        UnsupportedModelError: another architecture, or a field whose meaning is not implemented.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"must be a string, got {architecture!r}", file=str(header.path), field="general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {architecture[:60]!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if header.metadata.get("split.count", 1) != 1:
        raise UnsupportedModelError(
            f"{header.path}: a GGUF split over several files is not supported; merge it with llama-gguf-split --merge"
        )
    fields = _Fields(header, architecture)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_sizes(fields)}
    config |= {
        "hidden_act": "silu",
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields, config["head_dim"], read_tensor),
        "attention_bias": _has_biases(header, config["num_hidden_layers"], "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": _has_biases(header, config["num_hidden_layers"], "ffn_gate", "ffn_up", "ffn_down"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float32",
        **_special_tokens(header, config["vocab_size"]),
    }
    fields.check_all_used()
    return config


def _sizes(fields: _Fields) -> dict[str, int]:
    header = fields.header
    embed, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    kv_heads = fields.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise fields.fail("attention.head_count_kv", f"{kv_heads} must divide attention.head_count {heads}")
    head_dim = fields.size("attention.key_length", max(embed // heads, 1))
    if head_dim % 2:
        raise fields.fail("attention.key_length", f"head dimension {head_dim} must be even")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.size(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{header.path}: llama.{key} {fields.get(key)} differs from the head dimension {head_dim}: not supported"
            )
    layers = fields.size("block_count")
    if layers > len(header.tensors):
        raise fields.fail("block_count", f"{layers} layers, but the file has {len(header.tensors)} tensors in all")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("the tensor is missing or no matrix", file=str(header.path), field="token_embd.weight")
    vocab = fields.size("vocab_size", embedding.shape[0])
    if vocab != embedding.shape[0]:
        raise fields.fail("vocab_size", f"{vocab}, but token_embd.weight has {embedding.shape[0]} rows")
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _has_biases(header: GGUFHeader, layers: int, *parts: str) -> bool:
    """Whether the projections have biases; Llama has them in all of `parts` or in none."""
    present = sum(f"blk.{layer}.{part}.bias" in header.tensors for layer in range(layers) for part in parts)
    if present not in (0, layers * len(parts)):
        raise UnsupportedModelError(f"{header.path}: biases on some of {', '.join(parts)} only are not supported")
    return present > 0


def _rope_scaling(fields: _Fields, head_dim: int, read_tensor: Callable[[str], np.ndarray]) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type")
    old_factor = fields.real("rope.scale_linear", 1.0)
    factor = fields.real("rope.scaling.factor", old_factor)
    fields.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in fields.header.tensors:
        if kind not in (None, "none"):
            raise UnsupportedModelError(f"{fields.header.path}: rope_freqs.weight together with rope scaling {kind!r} is not supported")
        return _llama3_scaling(fields, head_dim, read_tensor("rope_freqs.weight"))
    if kind == "linear" or (kind is None and factor != 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind not in (None, "none"):
        raise UnsupportedModelError(f"{fields.header.path}: llama.rope.scaling.type {kind!r} is not supported; supported: none, linear")
    return None


def _llama3_scaling(fields: _Fields, head_dim: int, factors: np.ndarray) -> dict[str, Any] | None:
    """Llama 3's rope parameters from the divisors of the frequencies that they give."""
    path = str(fields.header.path)
    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors)) or np.any(factors <= 0):
        raise CheckpointError(f"must be {head_dim // 2} positive numbers, got shape {factors.shape}", file=path, field="rope_freqs.weight")
    if np.all(factors == 1):
        return None
    factor = float(str(factors.astype(np.float32).max()))
    expected = llama3_frequency_divisors(head_dim, fields.real("rope.freq_base", 10000.0), factor)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError(f"{path}: rope_freqs.weight does not hold Llama 3's factors; other factors are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_CONTEXT,
    }


def llama3_frequency_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What Llama 3 divides each of the D/2 rope frequencies by, float64 `[D/2]`.

    Source: `_compute_llama3_parameters` of transformers' modeling_rope_utils.py.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3_ORIGINAL_CONTEXT / wavelengths
    smooth = np.clip((turns - LLAMA3_LOW_FREQ_FACTOR) / (LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _special_tokens(header: GGUFHeader, num_tokens: int) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        field = f"tokenizer.ggml.{key}_token_id"
        value = header.metadata.get(field)
        if value is not None and not _is_token_id(value, num_tokens):
            raise CheckpointError(
                f"must be a token id from 0 to {num_tokens - 1}, got {str(value)[:60]}", file=str(header.path), field=field
            )
        ids[name] = value
    return ids


def _is_token_id(value: Any, num_tokens: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < num_tokens


def generation_config_from_metadata(header: GGUFHeader, num_tokens: int) -> dict[str, Any]:
    """generation_config.json: the special tokens; `eos_token_id` is a list where the end of a turn is another token.

    Raises:
        CheckpointError: a special token is not one of the `num_tokens`.
    """
    config = {name: value for name, value in _special_tokens(header, num_tokens).items() if value is not None}
    field = "tokenizer.ggml.eot_token_id"
    end_of_turn = header.metadata.get(field)
    if end_of_turn is None:
        return config
    if not _is_token_id(end_of_turn, num_tokens):
        raise CheckpointError(
            f"must be a token id from 0 to {num_tokens - 1}, got {str(end_of_turn)[:60]}", file=str(header.path), field=field
        )
    if "eos_token_id" in config and end_of_turn != config["eos_token_id"]:
        config["eos_token_id"] = [config["eos_token_id"], end_of_turn]
    return config
