"""How greedy continuations are compared: first difference, tie or not, and on from there with the golden's token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.parity.golden_files import Golden

MAX_TIE_NATS = 0.02
"""Where the golden's two best tokens are this close, float32 rounding may choose either."""

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""(prompts, numbers of new tokens) -> new tokens of each."""


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs; None when all of `expected` was got."""
    return next((i for i, token_id in enumerate(expected) if i >= len(got) or got[i] != token_id), None)


def count_tied_prompts(goldens: Sequence[Golden], generate: Generate) -> int:
    """How many prompts needed a tie; every other token must be the golden's.

    After a tie the prompt goes on teacher-forced: prompt and golden tokens up to and including the tied one.

    Raises:
        AssertionError: a token differs where the golden had a clear winner, or its rival was another token.
    """
    starts = {index: 0 for index in range(len(goldens))}
    tied: set[int] = set()
    while starts:
        batch = list(starts)
        prompts = [goldens[i].prompt_token_ids + goldens[i].token_ids[: starts[i]] for i in batch]
        answers = generate(prompts, [len(goldens[i].token_ids) - starts[i] for i in batch])
        following = {}
        for index, answer in zip(batch, answers, strict=True):
            golden = goldens[index]
            offset = first_difference(answer, golden.token_ids[starts[index] :])
            if offset is None:
                continue
            step = starts[index] + offset
            assert offset < len(answer), (
                f"prompt {index}: {len(answer)} tokens came, {len(golden.token_ids) - starts[index]} were asked for"
            )
            told = f"prompt {index} ({golden.kind}), step {step}: got {answer[offset]}, expected {golden.token_ids[step]}"
            assert golden.gaps[step] <= MAX_TIE_NATS, f"{told}, which leads by {golden.gaps[step]} nat"
            assert answer[offset] == golden.runner_up_ids[step], f"{told}; in this tie the rival is {golden.runner_up_ids[step]}"
            tied.add(index)
            if step + 1 < len(golden.token_ids):
                following[index] = step + 1
        starts = following
    return len(tied)
