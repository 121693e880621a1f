"""Llama in plain numpy float64: the whole sequence at once, no cache, no batching, nothing of jax.

Formulas: Hugging Face's modeling_llama.py (RMSNorm, rotary embedding by halves, grouped-query attention, SwiGLU). The int8 variant
is W8A8 as `--quantization int8` defines it: weights symmetric per output channel, activations symmetric per token, in two int8 terms
where they have outliers, products exact; norms, rotation and attention stay float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

INT8_MAX = 127
RESIDUAL_STEPS = 254
"""How much finer the second int8 term of an activation is: half a step of the first becomes the whole range of the second."""
ONE_TERM_INPUTS: tuple[str, ...] = ()
"""Names of products whose activations are one int8 term, everywhere else they are two; a test breaks the oracle with it."""


def _rounded(steps: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(steps), -INT8_MAX, INT8_MAX)


def row_scales(rows: np.ndarray) -> np.ndarray:
    """Float32 `[..., 1]`: the largest magnitude of each row over 127; one for a row of zeros."""
    largest = np.abs(rows.astype(np.float32)).max(axis=-1, keepdims=True)
    return np.where(largest > 0, largest / np.float32(INT8_MAX), np.float32(1))


def quantize_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 per row of `rows [..., K]`: `(q int8 [..., K], scale float32 [..., 1])`, q * scale ~ rows."""
    scale = row_scales(rows)
    return _rounded(rows.astype(np.float32) / scale).astype(np.int8), scale


def round_activations(x: np.ndarray, num_terms: int) -> np.ndarray:
    """`x [T, K]` as int8 terms times the row's scale say it, float64.

    Works on values rounded to float32 and in float32, as an engine does: in float64 a value next to a rounding edge would fall on
    the other side more often than needed.
    """
    scale = row_scales(x)
    steps = x.astype(np.float32) / scale
    first = _rounded(steps)
    terms = first.astype(np.float64)
    if num_terms == 2:
        terms += _rounded((steps - first) * np.float32(RESIDUAL_STEPS)).astype(np.float64) / RESIDUAL_STEPS
    return terms * scale


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x [T, K]` times `weight [N, K]` transposed, float64."""
    return x.astype(np.float64) @ weight.astype(np.float64).T


def int8_linear(x: np.ndarray, weight: np.ndarray, num_terms: int) -> np.ndarray:
    """The W8A8 product of `x [T, K]` and float `weight [N, K]`, float64."""
    q_weight, weight_scale = quantize_rows(weight)
    return linear(round_activations(x, num_terms), q_weight) * weight_scale[:, 0]


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """`x` over the root of its mean square, last axis, times `weight`."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of `x [T, H, D]` at positions 0..T-1; dimension d turns together with d + D/2."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention of `q [T, H, D]` over `k, v [T, K, D]`; query head h reads KV head h // (H / K)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores[:, ~np.tri(q.shape[0], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)


class LlamaOracle:
    """A Llama from float32 tensors with Hugging Face's names and a configuration with Hugging Face's keys."""

    def __init__(self, weights: Mapping[str, np.ndarray], config: Mapping[str, Any], quantization: Literal["none", "int8"] = "none"):
        self._weights = weights
        self._config = config
        self._is_int8 = {"none": False, "int8": True}[quantization]
        embedding = weights["model.embed_tokens.weight"]
        self._head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
        if self._is_int8:
            # The table is kept once, as int8 rows and scales; the look-up reads the same rows as the output product.
            q_embedding, scale = quantize_rows(embedding)
            embedding = q_embedding * scale
        self._embedding = embedding

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits `[len(token_ids), V]` float64; row i predicts token i + 1."""
        x = self.embed(token_ids)
        for index in range(self.num_layers):
            x = self.layer(index, x)
        return self.head(x)

    @property
    def num_layers(self) -> int:
        return self._config["num_hidden_layers"]

    def embed(self, token_ids: Sequence[int]) -> np.ndarray:
        """Token vectors `[T, E]`."""
        return self._embedding[np.asarray(token_ids)].astype(np.float64)

    def layer(self, index: int, x: np.ndarray) -> np.ndarray:
        """One block over the whole sequence `x [T, E]`."""
        name = f"model.layers.{index}"
        x = x + self._attention(self._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        return x + self._mlp(self._norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")

    def head(self, x: np.ndarray) -> np.ndarray:
        """Logits `[T, V]` of hidden states `[T, E]`."""
        return self._product(self._norm(x, "model.norm"), self._head, "lm_head")

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self._weights[f"{name}.weight"], self._config["rms_norm_eps"])

    def _project(self, x: np.ndarray, name: str) -> np.ndarray:
        return self._product(x, self._weights[f"{name}.weight"], name)

    def _product(self, x: np.ndarray, weight: np.ndarray, name: str) -> np.ndarray:
        if not self._is_int8:
            return linear(x, weight)
        return int8_linear(x, weight, num_terms=1 if name.endswith(ONE_TERM_INPUTS) else 2)

    def _attention(self, x: np.ndarray, name: str) -> np.ndarray:
        head_dim, theta = self._config["head_dim"], self._config["rope_theta"]
        q, k, v = (self._project(x, f"{name}.{part}_proj").reshape(len(x), -1, head_dim) for part in "qkv")
        mixed = causal_attention(rotate(q, theta), rotate(k, theta), v)
        return self._project(mixed.reshape(len(x), -1), f"{name}.o_proj")

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = self._project(x, f"{name}.gate_proj"), self._project(x, f"{name}.up_proj")
        return self._project(gate / (1 + np.exp(-gate)) * up, f"{name}.down_proj")


def row_errors(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative error of each row `[R, C]`: norm of the difference over the norm of the expected row."""
    expected = expected.astype(np.float64)
    return np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
