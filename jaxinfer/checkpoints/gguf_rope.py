"""How a GGUF file scales rotary frequencies -> `rope_scaling` of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import Any

import numpy as np

from jaxinfer.checkpoints.gguf_fields import Fields, shortest
from jaxinfer.errors import CheckpointError, UnsupportedModelError

ReadTensor = Callable[[str], np.ndarray]
"""A tensor by its GGUF name."""

LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR, LLAMA3_ORIGINAL_CONTEXT = 1.0, 4.0, 8192
"""The only parameters that Llama 3.1 and 3.2 were released with; a GGUF keeps just the factors they give."""
ATTENTION_FACTOR_TOLERANCE = 1e-4
YARN_BETAS = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}


def rope_scaling(fields: Fields, head_dim: int, read_tensor: ReadTensor, kinds: tuple[str, ...]) -> dict[str, Any] | None:
    """The scaling as a dict with `rope_type`, None where there is none.

    Args:
        head_dim: dimensions that are rotated.
        kinds: the types that this architecture has: of linear, yarn, llama3.

    Raises:
        CheckpointError: factors that make no sense.
        UnsupportedModelError: another type.
    """
    kind = fields.get("rope.scaling.type")
    factor = fields.real("rope.scaling.factor", fields.real("rope.scale_linear", 1.0))
    original = fields.size("rope.scaling.original_context_length", fields.size("context_length"))
    attention = fields.real("rope.scaling.attn_factor", 1.0) * fields.real("rope.scaling.yarn_attn_factor", 1.0)
    if kind is None and factor != 1.0:
        kind = "linear"  # older files have the factor alone
    if LLAMA3_FACTORS in fields.header.tensors and "llama3" in kinds:
        if kind not in (None, "none"):
            raise UnsupportedModelError(f"{fields.header.path}: {LLAMA3_FACTORS} together with rope scaling {kind!r} is not supported")
        return _llama3(fields, head_dim, read_tensor(LLAMA3_FACTORS))
    if kind not in (None, "none", *kinds):
        allowed = ", ".join(["none", *(known for known in kinds if known != "llama3")])
        raise fields.unsupported("rope.scaling.type", f"is not supported; supported: {allowed}")
    if kind == "yarn":
        return _yarn(fields, factor, original, attention)
    if attention != 1.0:
        raise fields.unsupported("rope.scaling.attn_factor", f"is not supported with rope scaling {kind or 'none'!r}")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else None


def _yarn(fields: Fields, factor: float, original: int, attention: float) -> dict[str, Any]:
    """YaRN. llama.cpp multiplies its attention factor with 1 + 0.1 ln(factor), Hugging Face's is the whole (`ggml_rope_yarn_corr_dims`)."""
    for key, value in (("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)):
        if fields.get(key) not in (None, value):
            raise fields.unsupported(key, f"is not supported; supported: {value}")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    scaling |= {name: fields.real(key) for key, name in YARN_BETAS.items() if fields.get(key) is not None}
    if attention != 1.0:
        scaling["attention_factor"] = shortest(attention * (1 + 0.1 * log(factor)))
    return scaling


def _llama3(fields: Fields, head_dim: int, factors: np.ndarray) -> dict[str, Any] | None:
    """Llama 3's rope parameters from the divisors of the frequencies that they give."""
    path = str(fields.header.path)
    _check_factors(path, LLAMA3_FACTORS, factors, head_dim)
    if np.all(factors == 1):
        return None
    factor = float(str(factors.astype(np.float32).max()))
    expected = llama3_frequency_divisors(head_dim, fields.real("rope.freq_base", 10000.0), factor)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError(f"{path}: {LLAMA3_FACTORS} does not hold Llama 3's factors; other factors are not supported")
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


def longrope_scaling(fields: Fields, head_dim: int, read_tensor: ReadTensor, original: int) -> dict[str, Any] | None:
    """Phi-3's scaling from its two tensors of factors, None where the file has neither.

    `attention_factor` is left out where it is the one that Hugging Face computes itself: sqrt(1 + ln(s) / ln(original)) with
    s = context / original (`_compute_longrope_parameters` of transformers' modeling_rope_utils.py).

    Raises:
        CheckpointError: only one of the tensors is there, or factors make no sense.
    """
    path, tensors = str(fields.header.path), fields.header.tensors
    present = [name for name in (LONG_FACTORS, SHORT_FACTORS) if name in tensors]
    kind = fields.get("rope.scaling.type")
    if kind not in (None, "none", "longrope"):
        raise fields.unsupported("rope.scaling.type", "is not supported; supported: none, longrope")
    attention = fields.real("rope.scaling.attn_factor", 1.0)
    if not present:
        if kind == "longrope" or attention != 1.0:
            raise CheckpointError("the tensor is missing", file=path, field=LONG_FACTORS)
        return None
    if len(present) == 1:
        other = SHORT_FACTORS if present == [LONG_FACTORS] else LONG_FACTORS
        raise CheckpointError(f"the tensor is missing, but {present[0]} is there", file=path, field=other)
    factors = {name: read_tensor(name) for name in present}
    for name, values in factors.items():
        _check_factors(path, name, values, head_dim)
    scale = fields.size("context_length") / original
    usual = sqrt(1 + log(scale) / log(original)) if scale > 1 and original > 1 else 1.0
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [shortest(value) for value in factors[SHORT_FACTORS]],
        "long_factor": [shortest(value) for value in factors[LONG_FACTORS]],
    }
    if abs(attention - usual) > ATTENTION_FACTOR_TOLERANCE:
        scaling["attention_factor"] = attention
    return scaling


def _check_factors(path: str, name: str, factors: np.ndarray, head_dim: int) -> None:
    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors)) or np.any(factors <= 0):
        raise CheckpointError(f"must be {head_dim // 2} positive numbers, got shape {factors.shape}", file=path, field=name)
