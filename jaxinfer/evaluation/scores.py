"""Perplexity, and agreement with a reference, over windows of text; computed by the engine's own compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxinfer.engine import Engine
from jaxinfer.errors import RequestError
from jaxinfer.tokenizer import Tokenizer

MIN_WINDOW = 8

OnWindow = Callable[[int, int], None]
"""Called with the number of windows done and their total."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood of each token given those before it in its window."""

    perplexity: float
    num_tokens: int
    """Tokens that were predicted: a window's first is not."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a model's distributions over the next token compare with a reference's, at every position."""

    kl_mean: float
    """Mean of KL(reference || model), nat."""
    kl_p99: float
    """99 % of the positions are below."""
    top1: float
    """Share of positions where both have the same most likely token."""
    perplexity: Perplexity
    reference: Perplexity


def windows_of(
    texts: Iterable[str], tokenizer: Tokenizer, *, num_tokens: int, window: int, max_per_text: int | None = 2
) -> list[list[int]]:
    """Tokens in windows of equal length, cut one after the other from the texts in turn.

    At most `max_per_text` from each, so that a few thousand tokens come from many samples; None is no limit. A text's first window
    starts as the model is used to (with its BOS token, where it has one), the others in the middle of the text, with BOS too.

    Raises:
        RequestError: sizes that make no sense, or texts too short for one window.
    """
    if window < MIN_WINDOW or num_tokens < window:
        raise RequestError(f"window must be at least {MIN_WINDOW} and num_tokens at least a window, got {window} and {num_tokens}")
    count = num_tokens // window
    windows: list[list[int]] = []
    for text in texts:
        token_ids = tokenizer.encode(text)
        prefix = tokenizer.encode("")  # what the tokenizer puts in front of every text
        body = token_ids[len(prefix) :]
        size = window - len(prefix)
        windows += [prefix + body[start : start + size] for start in range(0, len(body) - size + 1, size)[:max_per_text]]
        if len(windows) >= count:
            return windows[:count]
    if not windows:
        raise RequestError(f"the text is shorter than one window of {window} tokens")
    return windows


def log_probs(engine: Engine, token_ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities [T V] of the next token after each token, float32, over the tokenizer's vocabulary."""
    logits = engine.logits_for(token_ids)[:, : engine.description.vocab_size]
    return np.asarray(_log_softmax(logits))


def measure_perplexity(engine: Engine, windows: Sequence[Sequence[int]], on_window: OnWindow = lambda done, total: None) -> Perplexity:
    """The model's perplexity over windows of tokens."""
    losses = []
    for done, token_ids in enumerate(windows):
        losses.append(_losses(log_probs(engine, token_ids), token_ids))
        on_window(done + 1, len(windows))
    return _perplexity(losses)


def measure_agreement(
    engine: Engine,
    windows: Sequence[Sequence[int]],
    reference: Callable[[int], np.ndarray],
    on_window: OnWindow = lambda done, total: None,
) -> Agreement:
    """Compare a model with a reference; `reference(i)` gives its log-probabilities of window i, see `log_probs`."""
    kls, is_same, losses, reference_losses = [], [], [], []
    for index, token_ids in enumerate(windows):
        expected, actual = reference(index), log_probs(engine, token_ids)
        kl, same = _compare(expected, actual)
        kls.append(np.asarray(kl, np.float64))
        is_same.append(np.asarray(same))
        losses.append(_losses(actual, token_ids))
        reference_losses.append(_losses(expected, token_ids))
        on_window(index + 1, len(windows))
    all_kls = np.concatenate(kls)
    return Agreement(
        kl_mean=float(all_kls.mean()),
        kl_p99=float(np.quantile(all_kls, 0.99)),
        top1=float(np.concatenate(is_same).mean()),
        perplexity=_perplexity(losses),
        reference=_perplexity(reference_losses),
    )


@jax.jit
def _log_softmax(logits: Float32[Array, "T V"]) -> Float32[Array, "T V"]:
    return jax.nn.log_softmax(logits, axis=-1)


@jax.jit
def _compare(expected: Float32[Array, "T V"], actual: Float32[Array, "T V"]) -> tuple[Float32[Array, "T"], Int32[Array, "T"]]:
    kl = jnp.sum(jnp.exp(expected) * (expected - actual), axis=-1)
    return kl, jnp.argmax(expected, axis=-1) == jnp.argmax(actual, axis=-1)


def _losses(log_probs: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    targets = np.asarray(token_ids[1:])
    return -log_probs[np.arange(len(targets)), targets].astype(np.float64)


def _perplexity(losses: Sequence[np.ndarray]) -> Perplexity:
    every = np.concatenate(losses)
    return Perplexity(float(np.exp(every.mean())), every.size)
