"""Sampling by the book: numpy float64, full sorts, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

AMBIGUOUS = 2e-6
"""Shares of the total this close to a threshold may fall on either side of it in float32."""


@dataclass(kw_only=True)
class Row:
    """One row's parameters, as a person would say them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    target: int | None = None
    seed: int = 0
    position: int = 0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def cleaned(logits: np.ndarray, valid: int) -> np.ndarray:
    x = logits.astype(np.float64)
    x[np.isnan(x)] = -np.inf
    x[valid:] = -np.inf
    return np.minimum(x, np.finfo(np.float32).max)


def changed_logits(logits: np.ndarray, valid: int, row: Row) -> np.ndarray:
    x = cleaned(logits, valid)
    if row.allowed is not None:
        banned = np.ones(len(x), bool)
        banned[row.allowed] = False
        x[banned] = -np.inf
    for token, value in row.bias.items():
        x[token] += value
    for token in set(row.prompt) | set(row.output):
        x[token] = x[token] / row.repetition_penalty if x[token] > 0 else x[token] * row.repetition_penalty
    for token in set(row.output):
        x[token] -= row.frequency_penalty * row.output.count(token) + row.presence_penalty
    return x


def distribution(logits: np.ndarray, valid: int, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities after truncation, and which tokens are too close to a threshold to call."""
    x = changed_logits(logits, valid, row)
    one_hot = np.zeros(len(x))
    unsure = np.zeros(len(x), bool)
    if np.all(x == -np.inf):
        one_hot[np.argmax(cleaned(logits, valid))] = 1
        return one_hot, unsure
    if row.temperature == 0 or row.top_k == 1:
        one_hot[np.argmax(x)] = 1
        return one_hot, unsure
    p = np.exp((x - x.max()) / row.temperature)
    if 0 < row.min_p < 1:
        unsure |= np.abs(p - row.min_p) < 1e-6 * row.min_p  # at 1 only the maximum stays, exactly
    p[p < row.min_p] = 0
    if 0 < row.top_k < len(x):
        p[x < np.sort(x)[-row.top_k]] = 0
    p /= p.sum()
    if row.top_p < 1:
        order = np.argsort(-x, kind="stable")
        cumulative = np.concatenate([[0.0], np.cumsum(p[order])])
        # Equal logits share a fate, hence the mass above the first of them.
        first_of_equals = np.searchsorted(-x[order], -x, side="left")
        above = cumulative[first_of_equals]
        unsure |= np.abs(above - row.top_p) < AMBIGUOUS
        p[above >= row.top_p] = 0
        p /= p.sum()
    return p, unsure & (x > -np.inf)


def log_softmax(logits: np.ndarray, valid: int) -> np.ndarray:
    x = cleaned(logits, valid)
    with np.errstate(divide="ignore"):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())
