"""Perplexity and agreement of a random Llama against numpy float64."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.errors import RequestError
from jaxinfer.evaluation.scores import log_probs, measure_agreement, measure_perplexity, windows_of
from tests.parity.oracle import LlamaOracle
from tests.tiny_llama import random_weights

WINDOWS = [[(i * 37 + k * 101) % 4000 + 60 for i in range(40)] for k in range(3)]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, compile_cache_dir: Path) -> LLM:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "num_kv_blocks": 64, "show_progress": False}
    return LLM(model=str(tiny_llama), compile_cache_dir=compile_cache_dir, **options)


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[np.ndarray]:
    """Log-probabilities of each window, float64."""
    config = json.loads((tiny_llama / "config.json").read_text())
    oracle = LlamaOracle(random_weights(config, 0), config)
    every = []
    for window in WINDOWS:
        logits = oracle.logits(window)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        every.append(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
    return every


def test_perplexity_equals_the_oracle(llm: LLM, expected: list[np.ndarray]) -> None:
    losses = [-rows[np.arange(len(window) - 1), window[1:]] for rows, window in zip(expected, WINDOWS, strict=True)]
    result = measure_perplexity(llm.engine, WINDOWS)
    assert result.num_tokens == 3 * 39
    assert result.perplexity == pytest.approx(np.exp(np.concatenate(losses).mean()), rel=1e-5)


def test_agreement_equals_the_oracle(llm: LLM, expected: list[np.ndarray]) -> None:
    """Against a reference that is the oracle, sharpened: KL is then far from zero and known."""
    sharp = [1.3 * rows for rows in expected]
    sharp = [rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True)) for rows in sharp]
    sharp[0][5] = np.roll(sharp[0][5], 1)  # one position with another most likely token
    kl = np.concatenate([(np.exp(r) * (r - rows)).sum(axis=-1) for r, rows in zip(sharp, expected, strict=True)])
    result = measure_agreement(llm.engine, WINDOWS, lambda index: sharp[index].astype(np.float32))
    assert result.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert result.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert result.top1 == pytest.approx(119 / 120)
    assert result.perplexity.perplexity != pytest.approx(result.reference.perplexity, rel=1e-3)


def test_a_model_agrees_with_itself(llm: LLM) -> None:
    result = measure_agreement(llm.engine, WINDOWS, lambda index: log_probs(llm.engine, WINDOWS[index]))
    assert (result.kl_mean, result.top1) == (0.0, 1.0)


def test_windows(llm: LLM) -> None:
    texts = ["one two three four five six seven eight nine ten " * 4, "too short", "ten nine eight seven six five four three two one " * 9]
    windows = windows_of(texts, llm.tokenizer, num_tokens=32, window=8)
    assert [len(window) for window in windows] == [8] * 4
    assert llm.tokenizer.encode(texts[0])[:16] == windows[0] + windows[1], "the first text's first two windows"
    assert llm.tokenizer.encode(texts[2])[:16] == windows[2] + windows[3]
    with pytest.raises(RequestError, match="shorter than one window"):
        windows_of(["short"], llm.tokenizer, num_tokens=32, window=8)
    with pytest.raises(RequestError, match="at least"):
        windows_of(texts, llm.tokenizer, num_tokens=4, window=8)


def test_weights_can_be_replaced_for_a_while(llm: LLM) -> None:
    """The vocabulary's output matrix doubled: logits are doubled, and as before afterwards."""
    before = llm.engine.logits_for(WINDOWS[0])
    paths = []

    def double_output(path: str, array: jax.Array) -> jax.Array:
        paths.append(path)
        return 2.0 * array if path == "output.weight" else array

    with llm.engine.runner.replaced_weights(double_output):
        np.testing.assert_allclose(llm.engine.logits_for(WINDOWS[0]), 2 * before, rtol=1e-5)
    assert {"embedding.weight", "layers.1.attention.qkv.weight"} <= set(paths)
    np.testing.assert_array_equal(llm.engine.logits_for(WINDOWS[0]), before)
