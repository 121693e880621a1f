"""A row's bits depend on the row alone."""

from __future__ import annotations

import numpy as np

from jaxinfer.sampling import SampleResult
from tests.sampling.harness import NUM_ROWS, VALID, VOCAB, padded_rows, run
from tests.sampling.oracle import Row


def varied_rows() -> tuple[np.ndarray, list[Row]]:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (NUM_ROWS, VOCAB)).astype(np.float32)
    logits[:, VALID:] = 1e30
    kinds = [
        Row(),
        Row(temperature=1.7, top_p=0.6),
        Row(temperature=0),
        Row(top_k=30, top_p=0.9),
        Row(top_k=200),
        Row(min_p=0.02),
        Row(repetition_penalty=1.3, frequency_penalty=0.2, prompt=[1, 5], output=[5, 6, 6]),
        Row(bias={9: 3.0, 8: -np.inf}, allowed=list(range(1000))),
        Row(target=3),
    ]
    rows = [Row(**{**vars(kinds[index % len(kinds)]), "seed": index, "position": index % 5}) for index in range(NUM_ROWS)]
    return logits, rows


def assert_same(got: SampleResult, rows: slice, expected: SampleResult, expected_rows: slice) -> None:
    for name in ("token_ids", "logprob", "rank", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(got, name)[rows], getattr(expected, name)[expected_rows], err_msg=name)


def test_same_bits_at_any_number_of_rows() -> None:
    logits, rows = varied_rows()
    whole = run(logits, rows, logprobs=True)
    for num_rows in (8, 16, 32):
        for start in (0, NUM_ROWS - num_rows):
            part = slice(start, start + num_rows)
            assert_same(run(logits[part], rows[part], logprobs=True), slice(None), whole, part)


def test_same_bits_alone_and_whoever_else_is_there() -> None:
    logits, rows = varied_rows()
    whole = run(logits, rows, logprobs=True)
    for index in (0, 1, 3, 4, 6, 7, 8, 63):
        alone = run(np.concatenate([logits[index : index + 1]] + [logits[:1]] * 7), padded_rows([rows[index]], 8), logprobs=True)
        assert_same(alone, slice(0, 1), whole, slice(index, index + 1))


def test_flags_only_skip_work() -> None:
    logits, rows = varied_rows()
    plain = [Row(seed=index, temperature=0.8) for index in range(NUM_ROWS)]
    assert_same(run(logits, plain, all_flags=True), slice(None), run(logits, plain, logprobs=True), slice(None))
    np.testing.assert_array_equal(run(logits, rows).token_ids, run(logits, rows, all_flags=True).token_ids)


def test_tokens_do_not_depend_on_the_padding_of_the_vocabulary() -> None:
    logits, rows = varied_rows()
    wider = np.concatenate([logits, np.full((NUM_ROWS, 700), 1e30, np.float32)], axis=1)
    np.testing.assert_array_equal(run(wider, rows).token_ids, run(logits, rows).token_ids)


def test_seed_and_position_both_matter() -> None:
    logits = np.zeros((NUM_ROWS, VOCAB), np.float32)
    for change in ("seed", "position"):
        tokens = run(logits, [Row(**{change: index}) for index in range(NUM_ROWS)]).token_ids
        assert len(set(tokens.tolist())) > NUM_ROWS * 0.9
