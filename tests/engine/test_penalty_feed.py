"""What the penalties' state is told of a step, against counting in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.messages import ScheduledRequest
from jaxinfer.request import SamplingParams
from jaxinfer.sampling import PenaltyState, new_penalty_state
from jaxinfer.sampling.feed import fed_token_buffers, feed_penalty_state
from tests.engine.test_batching import row

MAX_TOKENS, NUM_SLOTS, VOCAB_SIZE = 8, 5, 11
PENALISED = SamplingParams(frequency_penalty=1.0)


def rows_of(draws: np.random.Generator) -> list[ScheduledRequest]:
    """One row for some of the slots: new with a resumed prefix of any length, going on, or fed back; some without penalties."""
    rows = []
    for slot in draws.permutation(NUM_SLOTS - 1)[: draws.integers(1, NUM_SLOTS)].tolist():
        start, count = int(draws.integers(0, 30)), int(draws.integers(1, 4))
        one = row(slot, draws.integers(0, VOCAB_SIZE, count).tolist(), start, [1], is_sampling=True)
        one.is_first_of_slot = bool(draws.integers(0, 2))
        one.resumed_token_ids = draws.integers(0, VOCAB_SIZE, start).tolist() if one.is_first_of_slot else []
        one.num_prompt_tokens = int(draws.integers(1, 40))
        one.is_fed_back = bool(draws.integers(0, 2))
        one.params = PENALISED if draws.integers(0, 4) else SamplingParams()
        if one.is_fed_back:
            one.token_ids[-1] = 0
        rows.append(one)
    return rows


def count(counts: np.ndarray, seen: np.ndarray, one: ScheduledRequest, last_tokens: np.ndarray) -> None:
    """The oracle: token by token."""
    if one.is_first_of_slot:
        counts[one.slot], seen[one.slot] = 0, False
    tokens = [*one.resumed_token_ids, *one.token_ids]
    if one.is_fed_back:
        tokens[-1] = last_tokens[one.slot]
    first = one.num_computed_tokens - len(one.resumed_token_ids)
    for position, token in enumerate(tokens, start=first):
        if position < one.num_prompt_tokens:
            seen[one.slot, token] = True
        else:
            counts[one.slot, token] += 1


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_those_of_all_tokens_before(seed: int) -> None:
    """Bug: a resumed prefix longer than the buffer is cut, a later buffer resets again, or the host's 0 is counted."""
    draws = np.random.default_rng(seed)
    feed = jax.jit(feed_penalty_state, static_argnums=3)
    state: PenaltyState = new_penalty_state(NUM_SLOTS, VOCAB_SIZE)
    counts, seen = np.zeros((NUM_SLOTS, VOCAB_SIZE), np.int64), np.zeros((NUM_SLOTS, VOCAB_SIZE), bool)
    num_buffers = set()
    for _ in range(6):
        rows, last_tokens = rows_of(draws), draws.integers(0, VOCAB_SIZE, NUM_SLOTS).astype(np.int32)
        buffers = fed_token_buffers(rows, MAX_TOKENS, NUM_SLOTS)
        num_buffers.add(len(buffers))
        for buffer in buffers:
            state = feed(state, jnp.asarray(last_tokens), jnp.asarray(buffer), MAX_TOKENS)
        for one in rows:
            if one.params is PENALISED:
                count(counts, seen, one, last_tokens)
        np.testing.assert_array_equal(np.asarray(state.output_counts)[:-1], counts[:-1])
        np.testing.assert_array_equal(np.asarray(state.prompt_seen)[:-1], seen[:-1])
    assert max(num_buffers) > 1, "nothing was longer than a buffer"
