from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling import PenaltyState, new_penalty_state
from tests.sampling.harness import NUM_ROWS, VALID, VOCAB, run, update
from tests.sampling.oracle import Row, changed_logits

SLOTS = 4
TRASH = SLOTS
CHUNK = 32


def feed(state: PenaltyState, tokens: list[tuple[int, int, int, int]], reset: list[int] | None = None) -> PenaltyState:
    """Feeds (token, slot, position, prompt_len) in one step, padded with the trash slot."""
    columns = np.array(tokens + [(3, TRASH, 0, 0)] * (CHUNK - len(tokens)), np.int32).T
    mask = np.zeros(SLOTS + 1, bool)
    mask[reset or []] = True
    return update(state, *map(jnp.asarray, columns), jnp.asarray(mask))


def history(rng: np.random.Generator, slot: int) -> list[tuple[int, int, int, int]]:
    length, prompt = int(rng.integers(10, 40)), int(rng.integers(1, 9))
    return [(int(rng.integers(0, 12)), slot, position, prompt) for position in range(length)]


def expected_state(histories: list[list[tuple[int, int, int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    counts, seen = np.zeros((SLOTS, 50), int), np.zeros((SLOTS, 50), bool)
    for token, slot, position, prompt in (item for items in histories for item in items):
        if position < prompt:
            seen[slot, token] = True
        else:
            counts[slot, token] += 1
    return counts, seen


def check(state: PenaltyState, histories: list[list[tuple[int, int, int, int]]]) -> None:
    counts, seen = expected_state(histories)
    np.testing.assert_array_equal(np.asarray(state.output_counts)[:SLOTS], counts)
    np.testing.assert_array_equal(np.asarray(state.prompt_seen)[:SLOTS], seen)


def test_the_state_does_not_depend_on_the_chunks() -> None:
    rng = np.random.default_rng(0)
    histories = [history(rng, slot) for slot in range(SLOTS)]
    interleaved = sorted((item for items in histories for item in items), key=lambda item: (item[2], item[1]))
    for chunk in (1, 7, CHUNK):
        state = new_penalty_state(SLOTS + 1, 50)
        for start in range(0, len(interleaved), chunk):
            state = feed(state, interleaved[start : start + chunk])
        check(state, histories)


def test_a_reset_slot_starts_anew_in_the_same_step() -> None:
    rng = np.random.default_rng(1)
    histories = [history(rng, slot)[:CHUNK] for slot in range(SLOTS)]
    state = new_penalty_state(SLOTS + 1, 50)
    for items in histories:
        state = feed(state, items)
    again = history(rng, 2)[:CHUNK]
    state = feed(state, again, reset=[2, 3])
    check(state, [histories[0], histories[1], again])


def test_an_id_beyond_the_vocabulary_is_dropped() -> None:
    state = feed(new_penalty_state(SLOTS + 1, 50), [(50, 0, 0, 1), (60, 1, 5, 1), (49, 1, 6, 1)])
    check(state, [[(49, 1, 6, 1)]])


def test_penalties_move_the_choice_as_the_formula_says() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (NUM_ROWS, VOCAB)).astype(np.float32)
    logits[:, VALID:] = 1e30
    rows = []
    for index in range(NUM_ROWS):
        best = np.argsort(-logits[index, :VALID])
        if index % 2:
            logits[index, :VALID] -= 10  # negative logits are multiplied, positive ones divided
        rows.append(
            Row(
                temperature=0,
                repetition_penalty=float(rng.choice([1.0, 0.8, 1.2, 1.9])),
                presence_penalty=float(rng.choice([0.0, -0.4, 0.7])),
                frequency_penalty=float(rng.choice([0.0, 0.3, -0.2])),
                prompt=best[rng.integers(0, 30, 6)].tolist(),
                output=best[rng.integers(0, 30, 12)].tolist(),
            )
        )
    expected = [int(np.argmax(changed_logits(logits[index], VALID, row))) for index, row in enumerate(rows)]
    np.testing.assert_array_equal(run(logits, rows).token_ids, expected)
    assert np.mean(np.array(expected) != logits[:, :VALID].argmax(axis=1)) > 0.4
