"""Rows of plain parameters -> the arrays of one compiled call. One shape for most tests, so that one compilation serves."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling import (
    PenaltyState,
    SampleResult,
    SamplingTensors,
    new_penalty_state,
    pack_flags,
    sample_full,
    sample_greedy,
    update_penalty_state,
)
from jaxinfer.sampling_keys import derive_key
from tests.sampling.oracle import Row

NUM_ROWS = 64
VOCAB = 1500
VALID = 1450
NUM_BIASES = 4

full = jax.jit(sample_full, static_argnums=4)
greedy = jax.jit(sample_greedy, static_argnums=1)
update = jax.jit(update_penalty_state)


def make_tensors(rows: Sequence[Row], vocab: int, *, logprobs: bool = False, all_flags: bool = False) -> SamplingTensors:
    num = len(rows)
    bias_ids = np.full((num, NUM_BIASES), vocab, np.int32)
    bias_values = np.zeros((num, NUM_BIASES), np.float32)
    mask = np.full((num, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    for index, row in enumerate(rows):
        for column, (token, value) in enumerate(row.bias.items()):
            bias_ids[index, column], bias_values[index, column] = token, value
        if row.allowed is not None:
            mask[index] = 0
            for token in row.allowed:
                mask[index, token // 32] |= np.uint32(1 << (token % 32))

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(row, name) for row in rows], dtype)

    def is_on(row: Row) -> bool:
        return row.repetition_penalty != 1 or row.presence_penalty != 0 or row.frequency_penalty != 0

    flags = pack_flags(
        any_penalties=all_flags or any(is_on(row) for row in rows),
        any_bias=all_flags or any(row.bias for row in rows),
        any_mask=all_flags or any(row.allowed is not None for row in rows),
        any_truncation=all_flags or any(row.top_k > 0 or row.top_p < 1 for row in rows),
        any_logprobs=logprobs or all_flags,
    )
    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return jax.tree.map(
        jnp.asarray,
        SamplingTensors(
            **{name: column(name, np.float32) for name in floats},
            top_k=column("top_k", np.int32),
            key=np.array([derive_key(row.seed, 0) for row in rows], np.uint32),
            position=column("position", np.int32),
            bias_ids=bias_ids,
            bias_values=bias_values,
            allowed_mask=mask,
            target_ids=np.array([row.target or 0 for row in rows], np.int32),
            is_target=np.array([row.target is not None for row in rows]),
            flags=flags,
        ),
    )


def fed_state(rows: Sequence[Row], vocab: int) -> PenaltyState:
    """The state after each row's prompt and output have been fed, row i in slot i; built without the code under test."""
    state = new_penalty_state(len(rows) + 1, vocab)
    counts, seen = np.array(state.output_counts), np.array(state.prompt_seen)
    for index, row in enumerate(rows):
        seen[index, row.prompt] = True
        np.add.at(counts[index], row.output, 1)
    return PenaltyState(output_counts=jnp.asarray(counts), prompt_seen=jnp.asarray(seen))


def run(logits: np.ndarray, rows: Sequence[Row], *, valid: int = VALID, logprobs: bool = False, all_flags: bool = False) -> SampleResult:
    vocab = logits.shape[1]
    tensors = make_tensors(rows, vocab, logprobs=logprobs, all_flags=all_flags)
    slots = jnp.arange(len(rows), dtype=jnp.int32)
    result = full(jnp.asarray(logits), tensors, fed_state(rows, vocab), slots, valid)
    return jax.tree.map(np.asarray, result)


def padded_rows(rows: list[Row], num: int = NUM_ROWS) -> list[Row]:
    return rows + [Row(temperature=0)] * (num - len(rows))
