from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.harness import NUM_ROWS, VALID, VOCAB, greedy, padded_rows, run
from tests.sampling.oracle import Row


@pytest.mark.parametrize("vocab", [7, 33, 1024, 1500, 4099])
def test_greedy_is_argmax_with_ties_at_the_lowest_id(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-4, 5, (8, vocab)).astype(np.float32)
    got = np.asarray(greedy(jnp.asarray(logits), vocab))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, logits.argmax(axis=1))


def test_padding_and_nan_are_never_chosen() -> None:
    logits = np.random.default_rng(0).normal(size=(8, 1500)).astype(np.float32)
    logits[:, 1450:] = 1e30
    logits[1, 1450:] = np.inf
    best = logits[:, :1450].argmax(axis=1)
    logits[2, 5] = np.nan
    logits[3] = np.nan
    logits[4] = -np.inf
    logits[5, :] = -np.inf
    logits[5, 1449] = -3e38
    logits[6, 77] = np.inf
    best[3:7] = [0, 0, 1449, 77]
    np.testing.assert_array_equal(greedy(jnp.asarray(logits), 1450), best)


def test_full_program_agrees_with_greedy() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (NUM_ROWS, VOCAB)).astype(np.float32)
    logits[:, VALID:] = 1e30
    expected = logits[:, :VALID].argmax(axis=1)
    for row in (
        Row(temperature=0),
        Row(temperature=0, top_k=3, top_p=0.5),
        Row(top_k=1, temperature=2.0),
        Row(temperature=1e-4),
        Row(top_p=1e-9),
    ):
        np.testing.assert_array_equal(run(logits, [row] * NUM_ROWS).token_ids, expected, err_msg=repr(row))


def test_banned_rows_fall_back_to_the_models_best_token() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (NUM_ROWS, VOCAB)).astype(np.float32)
    logits[:, VALID:] = 1e30
    logits[2] = np.nan
    logits[3, :VALID] = -np.inf
    rows = [
        Row(allowed=[]),
        Row(allowed=[VALID + 3], temperature=0),
        Row(),
        Row(top_p=0.9),
        Row(allowed=[4], bias={4: -np.inf}, top_k=3),
        Row(allowed=[9]),
    ]
    got = run(logits, padded_rows(rows), logprobs=True)
    best = logits[:, :VALID].argmax(axis=1)
    np.testing.assert_array_equal(got.token_ids[:6], [best[0], best[1], 0, 0, best[4], 9])
    for values in (got.logprob, got.top_logprobs):
        assert not np.isnan(values).any()


def test_a_target_row_reports_its_target() -> None:
    logits = np.random.default_rng(3).normal(size=(NUM_ROWS, VOCAB)).astype(np.float32)
    got = run(logits, padded_rows([Row(target=17), Row(target=0, temperature=0)]))
    np.testing.assert_array_equal(got.token_ids[:2], [17, 0])
