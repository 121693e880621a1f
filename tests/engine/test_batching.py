"""Shapes that are compiled, and the packed buffer of a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.batching import BatchShape, Buckets, SlotTables, build_forward_batch, logit_rows
from jaxinfer.forward_batch import StepSpec, field_shapes, unpack_fields
from jaxinfer.messages import ScheduledRequest, SchedulerOutput, SeqId
from jaxinfer.request import RequestId, SamplingParams


def row(slot: int, tokens: list[int], start: int, blocks: list[int], *, is_sampling: bool, positions: range = range(0)) -> ScheduledRequest:
    return ScheduledRequest(
        seq_id=SeqId(slot),
        request_id=RequestId(str(slot)),
        index=0,
        generation=0,
        slot=slot,
        token_ids=tokens,
        num_computed_tokens=start,
        num_prompt_tokens=start + len(tokens),
        num_output_tokens=0,
        block_ids=[blocks],
        is_sampling=is_sampling,
        is_first_of_slot=start == 0,
        prompt_logprob_positions=positions,
        params=SamplingParams(),
    )


@given(max_num_seqs=st.integers(1, 300), extra=st.integers(0, 3000), min_rows=st.sampled_from([1, 8]))
def test_buckets_hold_every_step_and_never_exceed_the_limit(max_num_seqs: int, extra: int, min_rows: int) -> None:
    limit = max_num_seqs + extra
    buckets = Buckets.build(max_num_seqs, limit, min_rows)
    assert max(spec.num_tokens for spec in buckets.specs) == max(limit, min_rows), "padding past the limit wastes and was seen to break"
    assert len(buckets.specs) <= 14
    for num_rows in {1, max_num_seqs}:
        for num_tokens in {num_rows, limit}:
            rows = [row(0, [1], 0, [1], is_sampling=True)] * num_rows
            spec = buckets.bucket_for(SchedulerOutput(rows, num_tokens, num_rows, []))
            assert spec.num_tokens >= num_tokens and spec.num_rows >= num_rows and spec.num_logit_rows >= num_rows
            smaller = [other for other in buckets.specs if other.num_tokens < spec.num_tokens]
            assert all(other.num_tokens < num_tokens or other.num_rows < num_rows for other in smaller), "a smaller one would do"
    assert buckets.max_num_logit_rows >= max_num_seqs


def test_the_packed_buffer_by_hand() -> None:
    """Two rows: a chunk in the middle of a prompt, a decode; blocks of 4."""
    scheduled = [
        row(3, [11, 12, 13], 6, [7, 2, 9], is_sampling=False, positions=range(7, 8)),
        row(0, [0], 4, [5, 8], is_sampling=True),
    ]
    scheduled[1].is_fed_back = True
    spec, shape = StepSpec(num_tokens=8, num_rows=4, num_logit_rows=4), BatchShape.build(1, 16, 4, max_num_seqs=5)
    rows = logit_rows(scheduled)
    packed = build_forward_batch(SchedulerOutput(scheduled, 4, 2, []), rows, spec, shape)
    got = unpack_fields(packed, field_shapes(spec, 1, 4))
    assert got["token_ids"].tolist() == [11, 12, 13, 0, 0, 0, 0, 0]
    assert got["is_fed_back"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert got["positions"].tolist() == [6, 7, 8, 4, 0, 0, 0, 0]
    assert got["token_slots"].tolist() == [3, 3, 3, 0, 5, 5, 5, 5]
    assert got["slot_mapping"][0].tolist() == [2 * 4 + 2, 2 * 4 + 3, 9 * 4 + 0, 8 * 4 + 0, 0, 0, 0, 0], "padding goes to the trash block"
    np.testing.assert_array_equal(got["block_tables"][0, :3], [[7, 2, 9, 0], [5, 8, 0, 0], [0, 0, 0, 0]])
    assert got["query_start_loc"].tolist() == [0, 3, 4, 4, 4]
    assert got["context_lens"].tolist() == [9, 5, 0, 0]
    assert got["logits_indices"].tolist() == [1, 3, 0, 0]
    assert [(entry.row, entry.position, entry.is_sampling) for entry in rows] == [(0, 7, False), (1, 4, True)]


def test_tables_kept_from_step_to_step_are_those_made_anew() -> None:
    """Blocks appended, the last one copied before it is written, dropped by a window, and a slot that changes hands."""
    shape = BatchShape.build(2, 64, 4, max_num_seqs=3)
    spec, tables = StepSpec(num_tokens=32, num_rows=3, num_logit_rows=4), SlotTables(shape)
    draws = np.random.default_rng(0)
    sequences = {}
    for _ in range(200):
        scheduled = []
        for slot in draws.permutation(3)[: draws.integers(1, 4)].tolist():
            is_first = slot not in sequences or draws.random() < 0.1 or sequences[slot][0] > 56
            start, full, window = (int(draws.integers(0, 20)), [], []) if is_first else sequences[slot]
            end = start + int(draws.integers(1, 8))
            num_blocks = max(len(full), min(16, -(-end // 4) + int(draws.integers(0, 2))))
            for table in (full, window):
                table += draws.integers(1, 99, num_blocks - len(table)).tolist()
                table[start // 4] = int(draws.integers(1, 99))
            num_dropped = max(0, start - 8) // 4
            window[:num_dropped] = [0] * num_dropped
            one = row(slot, draws.integers(0, 50, end - start).tolist(), start, full, is_sampling=True)
            one.block_ids, one.is_first_of_slot = [full, window], is_first
            sequences[slot] = (end, full, window)
            scheduled.append(one)
        output = SchedulerOutput(scheduled, sum(len(one.token_ids) for one in scheduled), len(scheduled), [])
        kept = build_forward_batch(output, logit_rows(scheduled), spec, shape, tables)
        np.testing.assert_array_equal(kept, build_forward_batch(output, logit_rows(scheduled), spec, shape))


def test_no_shape_for_a_step_that_is_too_large() -> None:
    with pytest.raises(AssertionError, match="no compiled shape"):
        Buckets.build(2, 8, 8).bucket_for(SchedulerOutput([], 9, 0, []))
