"""The kinds of routing against numpy float64, one token at a time."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer.layers.routing import Routing, SigmoidTopK, SoftmaxTopK, TopKSoftmax

NUM_TOKENS, NUM_EXPERTS = 40, 12


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((NUM_TOKENS, NUM_EXPERTS)) * 2).astype(np.float32)


def by_expert(choice: tuple, num_chosen: int) -> list[dict[int, float]]:
    """Each token's weights by expert; an expert is chosen once."""
    weights, experts = (np.asarray(part) for part in choice)
    rows = [dict(zip(row.tolist(), row_weights.tolist(), strict=True)) for row, row_weights in zip(experts, weights, strict=True)]
    assert all(len(row) == num_chosen for row in rows)
    return rows


def assert_equal(actual: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    for row, wanted in zip(actual, expected, strict=True):
        assert row.keys() == wanted.keys()
        assert all(row[expert] == pytest.approx(wanted[expert], rel=1e-5) for expert in row)


def softmax(row: np.ndarray) -> np.ndarray:
    powers = np.exp(row.astype(np.float64) - row.max())
    return powers / powers.sum()


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:count]


@pytest.mark.parametrize("is_renormalized", [False, True])
def test_softmax_then_top_k(logits: np.ndarray, is_renormalized: bool) -> None:
    expected = []
    for row in logits:
        scores = softmax(row)
        chosen = best(scores, 3)
        total = sum(scores[expert] for expert in chosen) if is_renormalized else 1.0
        expected.append({expert: 1.5 * scores[expert] / total for expert in chosen})
    routing = SoftmaxTopK(num_chosen=3, is_renormalized=is_renormalized, scaling=1.5)
    assert_equal(by_expert(routing(logits), 3), expected)


def test_top_k_then_softmax(logits: np.ndarray) -> None:
    expected = []
    for row in logits:
        chosen = best(row, 4)
        expected.append(dict(zip(chosen, softmax(row[chosen]), strict=True)))
    assert_equal(by_expert(TopKSoftmax(num_chosen=4)(logits), 4), expected)


def test_softmax_within_the_best_groups(logits: np.ndarray) -> None:
    """Four groups of three experts; two groups are open, by their best expert."""
    expected, unlimited = [], []
    for row in logits:
        scores = softmax(row)
        groups = best(np.array([scores[3 * group : 3 * group + 3].max() for group in range(4)]), 2)
        chosen = best(np.array([score if expert // 3 in groups else 0 for expert, score in enumerate(scores)]), 3)
        expected.append({expert: 16 * scores[expert] for expert in chosen})
        unlimited.append(best(scores, 3))
    routing = SoftmaxTopK(num_chosen=3, scaling=16.0, num_groups=4, num_chosen_groups=2)
    assert_equal(by_expert(routing(logits), 3), expected)
    assert sum(set(row) != set(free) for row, free in zip(expected, unlimited, strict=True)) > 5, "the groups must matter"


@pytest.mark.parametrize("is_renormalized", [False, True])
def test_sigmoid_with_a_correction_within_the_best_groups(logits: np.ndarray, is_renormalized: bool) -> None:
    """The correction chooses and does not weigh; a group counts by its two best experts."""
    correction = np.random.default_rng(1).standard_normal(NUM_EXPERTS).astype(np.float32)
    expected, by_best_one = [], 0
    for row in logits:
        scores = 1 / (1 + np.exp(-row.astype(np.float64)))
        corrected = scores + correction
        of_group = [np.sort(corrected[3 * group : 3 * group + 3]) for group in range(4)]
        groups = best(np.array([values[-1] + values[-2] for values in of_group]), 2)
        by_best_one += set(groups) != set(best(np.array([values[-1] for values in of_group]), 2))
        chosen = best(np.array([value if expert // 3 in groups else -np.inf for expert, value in enumerate(corrected)]), 4)
        total = sum(scores[expert] for expert in chosen) if is_renormalized else 1.0
        expected.append({expert: 2.5 * scores[expert] / total for expert in chosen})
    routing = SigmoidTopK(num_chosen=4, is_renormalized=is_renormalized, scaling=2.5, num_groups=4, num_chosen_groups=2)
    assert_equal(by_expert(routing(logits, correction), 4), expected)
    assert by_best_one > 0, "one expert and two must choose other groups somewhere"


def test_sigmoid_without_groups(logits: np.ndarray) -> None:
    expected = []
    for row in logits:
        scores = 1 / (1 + np.exp(-row.astype(np.float64)))
        expected.append({expert: scores[expert] for expert in best(scores, 2)})
    assert_equal(by_expert(SigmoidTopK(num_chosen=2, is_renormalized=False, scaling=1.0)(logits), 2), expected)


@pytest.mark.parametrize(
    "routing",
    [
        SoftmaxTopK(num_chosen=6, scaling=2.0, num_groups=8, num_chosen_groups=3),
        SoftmaxTopK(num_chosen=8, is_renormalized=True),
        TopKSoftmax(num_chosen=4),
        SigmoidTopK(num_chosen=8, is_renormalized=True, scaling=2.5, num_groups=8, num_chosen_groups=4),
    ],
    ids=lambda routing: type(routing).__name__,
)
def test_a_token_goes_the_same_way_in_any_batch(routing: Routing) -> None:
    """Eight rows and 64 of 128 experts: to the bit, and XLA's own softmax differs."""
    logits = (np.random.default_rng(3).standard_normal((64, 128)) * 2).astype(np.float32)
    run = jax.jit(lambda logits: routing(logits, None))
    weights, experts = (np.asarray(part) for part in run(logits))
    for start in range(0, 64, 8):
        few_weights, few_experts = run(logits[start : start + 8])
        np.testing.assert_array_equal(few_experts, experts[start : start + 8])
        np.testing.assert_array_equal(few_weights, weights[start : start + 8])


def test_equal_kinds_compare_equal() -> None:
    """Layers that route alike are traced once, which takes hashing and comparing them."""
    assert SoftmaxTopK(num_chosen=2) == SoftmaxTopK(num_chosen=2) != SoftmaxTopK(num_chosen=3)
    assert len({TopKSoftmax(num_chosen=2), TopKSoftmax(num_chosen=2)}) == 1
