from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.sampling.draw import bisected_top_k, is_in_top_p, kept_weights, multiply_high, pick, top_p_target
from jaxinfer.sampling.tensors import SamplingTensors
from jaxinfer.sampling.vocabulary import clean_logits, row_sum
from tests.sampling.harness import NUM_ROWS, VALID, VOCAB, full, make_tensors, run
from tests.sampling.harness import fed_state as state_of
from tests.sampling.oracle import Row, distribution


@jax.jit
def kept_tokens(logits: jax.Array, tensors: SamplingTensors) -> tuple[jax.Array, jax.Array]:
    """[M, V]: the integer weights, and whether a draw of that token would be accepted."""
    x = clean_logits(logits, VALID)
    weights = kept_weights(x, jnp.max(x, axis=1), tensors, jnp.ones(x.shape[:1], jnp.bool_))
    target = top_p_target(row_sum(weights), tensors.top_p)
    tokens = jnp.arange(logits.shape[1], dtype=jnp.int32)
    accepted = lax.map(lambda token: is_in_top_p(x, weights, jnp.full(target.shape, token), target), tokens)
    return weights[:, : logits.shape[1]], accepted.T


def random_rows(rng: np.random.Generator) -> tuple[np.ndarray, list[Row]]:
    rows, logits = [], []
    for _ in range(NUM_ROWS):
        rows.append(
            Row(
                temperature=float(rng.choice([1e-4, 0.3, 0.7, 1.0, 1.3, 5.0, 50.0])),
                top_k=int(rng.choice([0, 0, 2, 5, 40, 64, 65, 300, VALID, VOCAB, 10**6])),
                top_p=float(rng.choice([1.0, 1.0, 0.999, 0.95, 0.9, 0.5, 0.1, 1e-3])),
                min_p=float(rng.choice([0.0, 0.0, 0.01, 0.1, 0.6, 1.0])),
            )
        )
        kind = rng.integers(5)
        x = rng.normal(0, rng.choice([0.01, 1.0, 4.0]), VOCAB)
        if kind == 1:
            x = np.round(x * 2) / 2  # many ties
        elif kind == 2:
            x = x + 1e4
        elif kind == 3:
            x[rng.random(VOCAB) < 0.7] = -np.inf
        elif kind == 4:
            x[rng.integers(VOCAB)] = 1e4
        x[VALID:] = 1e30
        logits.append(x)
    return np.array(logits, np.float32), rows


@pytest.mark.parametrize("seed", range(8))
def test_kept_tokens_are_those_of_a_sort(seed: int) -> None:
    logits, rows = random_rows(np.random.default_rng(seed))
    # A greedy choice keeps one token by definition; here it is the truncation that is looked at.
    weights, accepted = map(np.asarray, kept_tokens(jnp.asarray(logits), make_tensors(rows, VOCAB)))
    assert weights.min() >= 0
    num_unsure = 0
    for index, row in enumerate(rows):
        expected, unsure = distribution(logits[index], VALID, row)
        kept = (weights[index] > 0) & accepted[index]
        sure = ~unsure
        num_unsure += int(unsure.sum())
        assert not np.any(kept & (expected == 0) & sure), (index, row)
        # A share below 2**-31 of what top_k and min_p left has weight zero.
        assert np.all(kept[(expected > 2e-9) & sure]), (index, row)
        total = weights[index].astype(np.int64).sum()
        assert 0 < total < 2**31
        got = np.where(kept, weights[index], 0).astype(np.float64)
        if not unsure.any():
            np.testing.assert_allclose(got / got.sum(), expected, rtol=1e-4, atol=1e-8, err_msg=repr(row))
    assert num_unsure < 1e-3 * logits.size


def test_weights_use_the_range_of_int32() -> None:
    """A tail of 49,151 tokens that each weigh 2**-25 of the best one must not get lost."""
    logits = np.full((8, 49152), -25 * np.log(2), np.float32)
    logits[:, 7] = 0
    tensors = make_tensors([Row()] * 8, 49152)
    weights = np.asarray(kept_weights(jnp.asarray(logits), jnp.zeros(8), tensors, jnp.ones(8, jnp.bool_))).astype(np.int64)
    tail = 1 - weights[:, 7] / weights.sum(axis=1)
    np.testing.assert_allclose(tail, 49151 / (2**25 + 49151), rtol=0.02)


@pytest.mark.parametrize("top_k", [65, 100, 700])
def test_bisected_threshold_selects_the_k_best(top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    x = rng.normal(0, 5, (8, 1024)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2, 50:] = -np.inf
    x[3] = np.where(x[3] > 0, np.float32(0.0), np.float32(-0.0))
    x[4] = np.finfo(np.float32).max
    select = jax.jit(lambda x, k: x >= bisected_top_k(x, k)[:, None])
    got = np.asarray(select(jnp.asarray(x), jnp.full(8, top_k, jnp.int32)))
    np.testing.assert_array_equal(got, x >= np.sort(x, axis=1)[:, -top_k, None])


CASES = [
    Row(),
    Row(temperature=0.7, top_k=20, top_p=0.9),
    Row(temperature=50.0, top_k=40),
    Row(top_p=0.3),
    Row(min_p=0.05, temperature=1.5),
    Row(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, prompt=[1, 2, 3], output=[1, 4, 4]),
    Row(bias={3: 2.0, 10: -np.inf, 11: -1.0}, allowed=[*range(0, 1400, 3), 10, 11], top_p=0.8),
    Row(temperature=0.4, top_p=0.95),
]


def test_draws_follow_the_distribution() -> None:
    rng = np.random.default_rng(11)
    base = rng.normal(0, 1, VOCAB)
    base[:20] += 5  # a head that shows, over a flat tail
    base[VALID:] = 1e30
    logits = np.tile(base.astype(np.float32), (NUM_ROWS, 1))
    rows = [CASES[index % len(CASES)] for index in range(NUM_ROWS)]
    state, slots = state_of(rows, VOCAB), jnp.arange(NUM_ROWS, dtype=jnp.int32)
    tensors, device_logits = make_tensors(rows, VOCAB), jnp.asarray(logits)
    counts = np.zeros((len(CASES), VOCAB))
    num_calls = 250
    for call in range(num_calls):
        positions = jnp.arange(NUM_ROWS, dtype=jnp.int32) + call * NUM_ROWS
        tokens = full(device_logits, tensors_at(tensors, positions), state, slots, VALID).token_ids
        np.add.at(counts, (np.arange(NUM_ROWS) % len(CASES), np.asarray(tokens)), 1)
    num_draws = num_calls * NUM_ROWS / len(CASES)
    for case, observed in zip(CASES, counts, strict=True):
        expected = distribution(logits[0], VALID, case)[0] * num_draws
        assert observed[expected == 0].sum() == 0, case
        large = expected >= 8
        bins_expected = np.append(expected[large], expected[~large].sum())
        bins_observed = np.append(observed[large], observed[~large].sum())
        used = bins_expected > 0
        chi_square = ((bins_observed - bins_expected)[used] ** 2 / bins_expected[used]).sum()
        freedom = used.sum() - 1
        assert freedom >= 2, case
        assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom), (case, chi_square, freedom)


def tensors_at(tensors: SamplingTensors, positions: jax.Array) -> SamplingTensors:
    return SamplingTensors(**{**{name: getattr(tensors, name) for name in tensors.__dataclass_fields__}, "position": positions})


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_stay_inside_their_supports(seed: int) -> None:
    logits, rows = random_rows(np.random.default_rng(100 + seed))
    for position in range(12):
        for row in rows:
            row.position = position
        tokens = run(logits, rows).token_ids
        for index, row in enumerate(rows):
            expected, unsure = distribution(logits[index], VALID, row)
            assert expected[tokens[index]] > 0 or unsure[tokens[index]], (index, row)


def test_the_ends_of_the_random_range_hit_tokens_of_positive_weight() -> None:
    weights = np.zeros((6, 4096), np.int32)
    weights[0, 5] = 1
    weights[1, [100, 4000]] = [1, 2**31 - 2]
    weights[2, [0, 4095]] = 1
    weights[3, 1023:1025] = 2**29
    weights[4, ::2] = 3
    weights[5, [31, 32]] = 7
    floor = jnp.full(6, -jnp.inf)
    for words, side in ((0, 0), (2**32 - 1, -1)):
        got = np.asarray(jax.jit(pick)(jnp.zeros((6, 4096)), jnp.asarray(weights), floor, jnp.full(6, words, jnp.uint32)))
        np.testing.assert_array_equal(got, [np.flatnonzero(row)[side] for row in weights])


def test_pick_inverts_the_cumulative_sum() -> None:
    rng = np.random.default_rng(5)
    weights = (rng.integers(0, 1000, (64, 3072)) * (rng.random((64, 3072)) < 0.1)).astype(np.int32)
    words = rng.integers(0, 2**32, 64, dtype=np.uint32)
    got = np.asarray(jax.jit(pick)(jnp.zeros(weights.shape), jnp.asarray(weights), jnp.full(64, -jnp.inf), jnp.asarray(words)))
    cumulative = np.cumsum(weights.astype(object), axis=1)
    for index in range(64):
        target = int(words[index]) * int(cumulative[index, -1]) >> 32
        assert got[index] == np.searchsorted(cumulative[index].astype(np.int64), target, side="right")


def test_wide_products() -> None:
    numbers = [0, 1, 2, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF]
    a, b = map(np.ravel, np.meshgrid(np.array(numbers, np.uint32), np.array(numbers, np.uint32)))
    high, low = map(np.asarray, multiply_high(jnp.asarray(a), jnp.asarray(b)))
    for index in range(len(a)):
        assert (int(high[index]) << 32) + int(low[index]) == int(a[index]) * int(b[index])
