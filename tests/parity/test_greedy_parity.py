"""The comparison itself: it must fail when a token is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parity.golden_files import NEW_TOKENS, Golden
from tests.parity.greedy_parity import count_tied_prompts

GOLDEN = Golden(
    kind="english",
    text="",
    prompt_token_ids=[1, 2, 3],
    token_ids=list(range(100, 100 + NEW_TOKENS)),
    runner_up_ids=[7] * NEW_TOKENS,
    gaps=[1.0] * NEW_TOKENS,
    columns=np.zeros((0, 0)),
    logits=np.zeros((0, 0)),
)


class FakeEngine:
    """Gives the golden's tokens, but `wrong[step]` at those steps; after a wrong token only nonsense follows, as in real life."""

    def __init__(self, wrong: dict[int, int]):
        self.wrong = wrong
        self.prompts: list[list[int]] = []

    def __call__(self, prompts: list[list[int]], num_new_tokens: list[int]) -> list[list[int]]:
        self.prompts += prompts
        return [
            self._answer(len(prompt) - len(GOLDEN.prompt_token_ids), count) for prompt, count in zip(prompts, num_new_tokens, strict=True)
        ]

    def _answer(self, start: int, count: int) -> list[int]:
        wrong = next((step for step in sorted(self.wrong) if step >= start), None)
        if wrong is None or wrong >= start + count:
            return GOLDEN.token_ids[start : start + count]
        right = GOLDEN.token_ids[start:wrong]
        return [*right, self.wrong[wrong], *[0] * (count - len(right) - 1)]


def close_at(*steps: int) -> Golden:
    return replace(GOLDEN, gaps=[0.01 if step in steps else 1.0 for step in range(NEW_TOKENS)])


def test_the_same_tokens_need_no_tie() -> None:
    assert count_tied_prompts([GOLDEN, GOLDEN], FakeEngine({})) == 0


def test_a_wrong_token_fails() -> None:
    with pytest.raises(AssertionError, match="step 5: got 7, expected 105, which leads by 1"):
        count_tied_prompts([GOLDEN], FakeEngine({5: 7}))


def test_a_tie_goes_on_with_the_goldens_token() -> None:
    engine = FakeEngine({5: 7, 20: 7, NEW_TOKENS - 1: 7})
    assert count_tied_prompts([close_at(5, 20, NEW_TOKENS - 1)], engine) == 1
    assert engine.prompts == [GOLDEN.prompt_token_ids + GOLDEN.token_ids[:length] for length in (0, 6, 21)]


def test_a_wrong_token_after_a_tie_fails() -> None:
    with pytest.raises(AssertionError, match="step 9"):
        count_tied_prompts([close_at(5)], FakeEngine({5: 7, 9: 7}))


def test_a_tie_with_a_third_token_fails() -> None:
    with pytest.raises(AssertionError, match="the rival is 7"):
        count_tied_prompts([close_at(5)], FakeEngine({5: 8}))


def test_missing_tokens_fail() -> None:
    with pytest.raises(AssertionError, match="3 tokens came"):
        count_tied_prompts([GOLDEN], lambda prompts, counts: [GOLDEN.token_ids[:3]])
