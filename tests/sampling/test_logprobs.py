from __future__ import annotations

import numpy as np

from tests.sampling.harness import NUM_ROWS, VALID, VOCAB, run
from tests.sampling.oracle import Row, log_softmax


def test_logprobs_and_ranks_are_those_of_the_models_distribution() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(0, 1, (NUM_ROWS, VOCAB)) * rng.choice([0.1, 3, 30], (NUM_ROWS, 1))).astype(np.float32)
    logits[:, VALID:] = 1e30
    logits[3] = np.round(logits[3])
    logits[4, :VALID] += 1e4
    logits[5, 3:] = -np.inf
    logits[6, 2] = np.nan
    rows = [Row(temperature=2.0, top_p=0.9, presence_penalty=1.0, output=[1, 2], bias={4: 5.0}) for _ in range(NUM_ROWS)]
    for index in range(0, NUM_ROWS, 2):
        rows[index] = Row(target=int(rng.integers(VALID)))
    rows[5], rows[6] = Row(target=1), Row(target=2)
    got = run(logits, rows, logprobs=True)
    for index in range(NUM_ROWS):
        expected, token = log_softmax(logits[index], VALID), got.token_ids[index]
        order = np.argsort(-expected, kind="stable")
        tolerance = 1e-5 * max(1.0, float(np.abs(logits[index, token])) / 100)
        np.testing.assert_allclose(got.logprob[index], expected[token], rtol=1e-6, atol=tolerance)
        assert got.rank[index] == np.flatnonzero(order == token)[0] + 1
        finite = np.isfinite(expected[order[:20]])
        np.testing.assert_array_equal(got.top_ids[index][finite], order[:20][finite])
        np.testing.assert_allclose(got.top_logprobs[index], expected[order[:20]], rtol=1e-6, atol=1e-5)


def test_nothing_is_reported_unasked() -> None:
    got = run(np.zeros((NUM_ROWS, VOCAB), np.float32), [Row(temperature=0)] * NUM_ROWS)
    assert not got.logprob.any() and not got.top_logprobs.any() and not got.rank.any()
