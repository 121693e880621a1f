"""Which experts a token goes to, and with what weights.

Each kind is a value: layers that route alike compare equal and are traced once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.layers.weights import WeightSpec, param

Choice = tuple[Float32[Array, "T J"], Int32[Array, "T J"]]
"""Weights and experts of each token, J of them."""


class Routing(Protocol):
    """A rule that turns router logits into a choice of experts."""

    def __call__(self, logits: Float32[Array, "T X"], correction: Float32[Array, "X"] | None) -> Choice:
        """Choose; `correction` is added to the scores for choosing alone, where the kind knows of it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxTopK:
    """The largest probabilities: HF MixtralTopKRouter, Qwen3MoeTopKRouter, and DeepseekV2TopkRouter with or without groups.

    With groups (`group_limited_greedy`, arXiv:2405.04434) only the experts of the `num_chosen_groups` groups whose best
    expert is most probable stand for choice.
    """

    num_chosen: int
    is_renormalized: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1

    def __call__(self, logits: Float32[Array, "T X"], correction: Float32[Array, "X"] | None = None) -> Choice:
        """Probabilities over all experts; renormalised they sum to one over the chosen."""
        highest, total = _softmax_parts(logits)
        if self.num_chosen_groups < self.num_groups:
            grouped = logits.reshape(logits.shape[0], self.num_groups, -1)
            logits = jnp.where(_in_best_groups(grouped.max(axis=-1), self.num_chosen_groups, logits.shape[1]), logits, -jnp.inf)
        chosen, experts = lax.top_k(logits, self.num_chosen)  # in the order of their probabilities
        weights = jnp.exp(chosen - highest) / total
        if self.is_renormalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights * self.scaling, experts


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKSoftmax:
    """The softmax of the largest logits alone: HF GptOssTopKRouter."""

    num_chosen: int

    def __call__(self, logits: Float32[Array, "T X"], correction: Float32[Array, "X"] | None = None) -> Choice:
        """Weights sum to one."""
        chosen, experts = lax.top_k(logits, self.num_chosen)
        return jax.nn.softmax(chosen, axis=-1), experts


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidTopK:
    """Sigmoid scores, chosen by score plus correction within the best groups: HF DeepseekV3TopkRouter, arXiv:2412.19437.

    A group's score is the sum of its two best corrected scores. The weights are the scores without correction.
    """

    num_chosen: int
    is_renormalized: bool
    scaling: float
    num_groups: int = 1
    num_chosen_groups: int = 1

    def __call__(self, logits: Float32[Array, "T X"], correction: Float32[Array, "X"] | None = None) -> Choice:
        """Renormalised the weights sum to `scaling`."""
        scores = jax.nn.sigmoid(logits)
        corrected = scores if correction is None else scores + correction[None, :]
        if self.num_chosen_groups < self.num_groups:
            best_two, _ = lax.top_k(corrected.reshape(scores.shape[0], self.num_groups, -1), 2)
            is_open = _in_best_groups(best_two.sum(axis=-1), self.num_chosen_groups, scores.shape[1])
            corrected = jnp.where(is_open, corrected, -jnp.inf)
        _, experts = lax.top_k(corrected, self.num_chosen)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.is_renormalized:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return weights * self.scaling, experts


def _softmax_parts(logits: Float32[Array, "T X"]) -> tuple[Float32[Array, "T 1"], Float32[Array, "T 1"]]:
    """The largest logit, and the sum of exp(logit - largest).

    Not as reductions: in larger batches XLA's CPU backend sums in another order, and an exponential fused with them has
    other bits.
    """
    highest, _ = lax.top_k(logits, 1)
    ones = jnp.ones((8, logits.shape[1]), jnp.float32)
    totals = lax.dot_general(jnp.exp(logits - highest), ones, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return highest, totals[:, :1]


def _in_best_groups(group_scores: Float32[Array, "T G"], num_chosen: int, num_experts: int) -> Array:
    """[T X]: whether each expert's group is among the best."""
    _, groups = lax.top_k(group_scores, num_chosen)
    is_best = (jnp.arange(group_scores.shape[1], dtype=groups.dtype)[None, None, :] == groups[:, :, None]).any(axis=1)
    return jnp.repeat(is_best, num_experts // group_scores.shape[1], axis=1)


class Router(nnx.Module):
    """Scores every expert in float32, on every device alike, and chooses."""

    def __init__(
        self, weight: str, size: int, num_experts: int, routing: Routing, *, bias: str | None = None, correction: str | None = None
    ):
        self.weight = param(WeightSpec((weight,), (num_experts, size), (None, None)), jnp.dtype("float32"))
        if bias is not None:
            self.bias = param(WeightSpec((bias,), (num_experts,), (None,)), jnp.dtype("float32"))
        if correction is not None:
            self.correction = param(WeightSpec((correction,), (num_experts,), (None,)), jnp.dtype("float32"))
        self.has_bias = bias is not None
        self.has_correction = correction is not None
        self.routing = routing

    def __call__(self, x: Float[Array, "T E"]) -> Choice:
        """The choice of each token."""
        logits = lax.dot_general(x.astype(jnp.float32), self.weight.get_value(), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        if self.has_bias:
            logits = logits + self.bias.get_value()[None, :]
        return self.routing(logits, self.correction.get_value() if self.has_correction else None)
