from __future__ import annotations

import subprocess
import sys

import pytest

from jaxinfer.config import SchedulerConfig
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.request import FinishReason, RequestStatus
from jaxinfer.scheduler import Scheduler, StepOutput
from tests.scheduler.cases import EOS, FULL, STOP, make_request, window_group
from tests.scheduler.replay import Harness


def steps_until(harness: Harness, condition, max_steps: int = 500) -> None:
    for _ in range(max_steps):
        if condition():
            return
        harness.step()
    raise AssertionError("the condition was never met")


def sample(harness: Harness, token_id: int):
    """One step in which every sampling row gets the same token, past the harness's own model."""
    output = harness.scheduler.schedule()
    assert output is not None
    return harness.scheduler.update(output, StepOutput([[token_id] if row.is_sampling else [] for row in output.scheduled]))


def test_importing_the_scheduler_leaves_jax_out():
    code = "import sys, jaxinfer.scheduler; sys.exit(any(name.split('.')[0] in ('jax', 'jaxlib', 'flax') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_is_computed_in_chunks_and_then_decodes_one_token_a_step():
    harness = Harness(max_num_batched_tokens=8)
    harness.add(make_request("a", 19, max_tokens=3, ignore_eos=True))
    rows = [harness.step().scheduled[0] for _ in range(5)]
    assert [(row.num_computed_tokens, len(row.token_ids), row.is_sampling) for row in rows] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
        (19, 1, True),
        (20, 1, True),
    ]
    assert [row.is_first_of_slot for row in rows] == [True, False, False, False, False]
    assert harness.step() is None and not harness.scheduler.has_work


def test_a_long_prompt_does_not_starve_decodes_even_ahead_of_them_in_the_order():
    harness = Harness(max_num_batched_tokens=8, num_blocks=(100,), max_model_len=200)
    decodes = [harness.add(make_request(f"short {i}", 2, ignore_eos=True, max_tokens=60))[0] for i in range(3)]
    steps_until(harness, lambda: all(record.output for record in decodes))
    harness.add(make_request("long", 100, priority=-1, ignore_eos=True))
    for num_decoded in range(2, 12):
        output = harness.step()
        assert output.num_tokens == 8
        assert [len(record.output) for record in decodes] == [num_decoded] * 3


def test_the_head_of_the_queue_is_not_overtaken_by_a_small_request_that_would_fit():
    harness = Harness(num_blocks=(10,), block_size=4)
    harness.add(make_request("running", 20, ignore_eos=True, max_tokens=8))
    harness.step()
    large = harness.add(make_request("large", 24, ignore_eos=True))[0]
    small = harness.add(make_request("small", 2, ignore_eos=True))[0]
    steps_until(harness, lambda: small.output)
    assert large.output
    harness.drain()


def test_priority_comes_before_arrival():
    harness = Harness(max_num_seqs=1)
    requests = [make_request(str(i), 3, priority=priority, max_tokens=2) for i, priority in enumerate((1, 0, -1, 0))]
    records = [harness.add(request)[0] for request in requests]
    order = []
    while harness.scheduler.has_work:
        order += [row.seq_id for row in harness.step().scheduled if row.is_first_of_slot]
    assert order == [records[i].sequence.seq_id for i in (2, 1, 3, 0)]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window_group(32))], ids=["full", "full and window"])
def test_preemption_takes_the_last_and_it_resumes_with_its_tokens_and_place(groups):
    harness = Harness(groups=groups, num_blocks=(14,) * len(groups), block_size=4)
    first, second = (harness.add(make_request(name, 16, ignore_eos=True, max_tokens=30))[0] for name in ("first", "second"))
    steps_until(harness, lambda: second.num_preemptions)
    assert first.num_preemptions == 0
    assert second.sequence.status is RequestStatus.PREEMPTED
    assert second.sequence.generation == 1
    tokens = list(second.tokens)
    assert len(tokens) > 16
    later = harness.add(make_request("later", 1, ignore_eos=True))[0]
    while second.sequence.slot is None:
        output = harness.step()
    row = next(row for row in output.scheduled if row.seq_id == second.sequence.seq_id)
    # What of it was still cached is not computed again.
    start = row.num_computed_tokens
    assert (row.generation, row.is_first_of_slot, start % 4) == (1, True, 0)
    assert row.token_ids == tokens[start : start + len(row.token_ids)]
    assert row.num_output_tokens == len(tokens) - 16
    assert not later.output or later.sequence.slot is not None
    harness.drain()


def test_a_lower_priority_sequence_is_preempted_although_it_came_first():
    harness = Harness(num_blocks=(10,), block_size=4)
    low = harness.add(make_request("low", 8, priority=5, ignore_eos=True, max_tokens=30))[0]
    harness.step()
    high = harness.add(make_request("high", 8, priority=0, ignore_eos=True, max_tokens=30))[0]
    harness.drain()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_pool_of_one_block(block_size):
    harness = Harness(num_blocks=(1,), block_size=block_size)
    if block_size == 1:
        with pytest.raises(RequestError, match="at most 0 are allowed"):
            harness.scheduler.add(make_request("a", 1))
        return
    records = [harness.add(make_request(name, 2, ignore_eos=True, max_tokens=None))[0] for name in "ab"]
    harness.drain()
    assert [(len(record.output), record.ends) for record in records] == [(2, [FinishReason.LENGTH])] * 2
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_blocks", "message"),
    [
        (0, 64, "must have at least 1 token, got 0"),
        (64, 64, "has 64 tokens and at most 63 are allowed: the context holds 64"),
        (40, 10, "has 40 tokens and at most 39 are allowed: the KV pool holds 40"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once(num_prompt_tokens, num_blocks, message):
    harness = Harness(num_blocks=(num_blocks,), block_size=4, max_model_len=64)
    with pytest.raises(RequestError, match=message) as error:
        harness.scheduler.add(make_request("a", num_prompt_tokens))
    assert error.value.param == "prompt"
    assert not harness.scheduler.has_work
    if num_prompt_tokens:
        fits = harness.add(make_request("b", num_prompt_tokens - 1))[0]
        harness.drain()
        assert fits.ends and len(fits.output) == 1


def test_a_request_id_is_unique_while_it_is_in_use():
    harness = Harness()
    harness.add(make_request("a", 3, max_tokens=2))
    with pytest.raises(RequestError, match="'a' is in use"):
        harness.scheduler.add(make_request("a", 3))
    harness.drain()
    harness.add(make_request("a", 3, max_tokens=2))
    harness.drain()


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "in flight", "finished", "unknown"])
def test_abort_in_each_state_frees_everything_and_is_reported_once(state):
    harness = Harness(num_blocks=(12,), block_size=4, max_num_batched_tokens=8)
    other = harness.add(make_request("other", 16, ignore_eos=True, max_tokens=24))[0]
    record = harness.add(make_request("a", 12, ignore_eos=state != "finished", max_tokens=1 if state == "finished" else 30))[0]
    reached = {
        "waiting": lambda: True,
        "prefilling": lambda: 0 < record.sequence.num_computed_tokens < 12,
        "decoding": lambda: len(record.output) > 1,
        "preempted": lambda: record.num_preemptions,
        "in flight": lambda: len(record.output) > 1,
        "finished": lambda: record.ends,
        "unknown": lambda: True,
    }
    steps_until(harness, reached[state])
    if state == "in flight":
        harness.launch()
    harness.abort("nobody" if state == "unknown" else "a")
    expected = {"finished": record.ends, "unknown": []}.get(state, [FinishReason.ABORT])
    assert record.ends == expected
    harness.abort("nobody" if state == "unknown" else "a")
    harness.drain()
    assert other.ends == [FinishReason.LENGTH]
    assert all(pool.num_held == 0 for pool in harness.pools.pools)


def test_requests_aborted_while_waiting_do_not_pile_up():
    harness = Harness(max_num_seqs=1)
    scheduler = harness.scheduler
    scheduler.add(make_request("running", 3, ignore_eos=True, max_tokens=50))
    scheduler.schedule()
    for i in range(2_000):
        scheduler.add(make_request(str(i), 3))
        scheduler.abort(str(i))
    last = scheduler.add(make_request("last", 3))[0]
    assert scheduler.num_waiting == 1
    assert len(scheduler._waiting._heap) <= 64 + 2
    scheduler.abort("running")
    assert [row.seq_id for row in scheduler.schedule().scheduled] == [last.seq_id]


def test_n_completions_share_a_request_and_end_one_by_one():
    harness = Harness(max_num_seqs=2)
    records = harness.add(make_request("a", 5, n=3, max_tokens=8, prompt_logprobs=0))
    assert [record.sequence.index for record in records] == [0, 1, 2]
    harness.step()
    harness.finish(records[0])
    assert harness.scheduler.has_work
    harness.drain()
    assert [len(record.ends) for record in records] == [1, 1, 1]
    assert [len(record.prompt_logprob_positions) for record in records] == [4, 0, 0]


@pytest.mark.parametrize(
    ("params", "sampled", "finish_reason", "stop_reason", "num_tokens"),
    [
        ({}, EOS, FinishReason.STOP, None, 1),
        ({"ignore_eos": True, "max_tokens": 3}, EOS, FinishReason.LENGTH, None, 3),
        ({"stop_token_ids": (STOP,)}, STOP, FinishReason.STOP, STOP, 1),
        ({"stop_token_ids": (STOP,), "ignore_eos": True}, STOP, FinishReason.STOP, STOP, 1),
        ({"stop_token_ids": (EOS,)}, EOS, FinishReason.STOP, None, 1),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, FinishReason.STOP, EOS, 1),
        ({"min_tokens": 4}, EOS, FinishReason.STOP, None, 5),
        ({"min_tokens": 4, "max_tokens": 4, "stop_token_ids": (STOP,)}, STOP, FinishReason.LENGTH, None, 4),
        ({"max_tokens": None}, 9, FinishReason.LENGTH, None, 60),
        ({"max_tokens": None, "min_tokens": 1000}, EOS, FinishReason.LENGTH, None, 60),
    ],
)
def test_what_ends_a_sequence(params, sampled, finish_reason, stop_reason, num_tokens):
    harness = Harness(max_model_len=64)
    sequence = harness.scheduler.add(make_request("a", 4, **params))[0]
    updates = []
    while harness.scheduler.has_work:
        updates += sample(harness, sampled)
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == (finish_reason, stop_reason)
    assert [update.finish_reason for update in updates[:-1]] == [None] * (num_tokens - 1)
    assert [token for update in updates for token in update.token_ids] == [sampled] * num_tokens == sequence.token_ids[4:]


def test_prompt_logprobs_cut_the_chunk_to_the_rows_of_a_step_and_leave_decodes_theirs():
    harness = Harness(max_num_logit_rows=6, max_num_seqs=3)
    decode = harness.add(make_request("decode", 2, ignore_eos=True, max_tokens=20))[0]
    harness.step()
    scored = harness.add(make_request("scored", 12, priority=-1, prompt_logprobs=1, ignore_eos=True, max_tokens=2))[0]
    rows = []
    while not scored.output:
        rows.append(next(row for row in harness.step().scheduled if row.seq_id == scored.sequence.seq_id))
    # 11 positions of the prompt and the sampled one: 12 rows, of which 5 a step are left beside the decode's.
    assert [(len(row.prompt_logprob_positions), row.is_sampling) for row in rows] == [(5, False), (5, False), (1, True)]
    assert len(decode.output) == 4
    harness.drain()


def test_newcomers_leave_a_running_prompt_the_blocks_it_will_still_take():
    harness = Harness(num_blocks=(12,), block_size=4, max_num_seqs=2, max_num_logit_rows=4)
    # Four scored positions a step: the prompt holds 1 block of 10 after its first step, while most of the step is unused.
    harness.add(make_request("scored", 40, prompt_logprobs=0, ignore_eos=True, max_tokens=2))
    harness.step()
    newcomer = harness.add(make_request("newcomer", 8, ignore_eos=True, max_tokens=30))[0]
    harness.step()
    assert newcomer.sequence.status is RequestStatus.WAITING
    harness.drain()
    assert harness.scheduler.num_preemptions == 0


def test_prompt_logprobs_that_were_delivered_are_not_asked_for_again_after_preemption():
    harness = Harness(num_blocks=(12,), block_size=4, max_num_seqs=2, max_num_logit_rows=2)
    harness.add(make_request("growing", 1, ignore_eos=True, max_tokens=40))
    harness.step()
    scored = harness.add(make_request("scored", 36, prompt_logprobs=0, ignore_eos=True, max_tokens=2))[0]
    steps_until(harness, lambda: scored.num_preemptions)
    assert 0 < len(scored.prompt_logprob_positions) < 35
    harness.drain()
    assert scored.prompt_logprob_positions == list(range(35))


def test_a_window_group_needs_blocks_for_its_window_only():
    harness = Harness(groups=(FULL, window_group(32)), num_blocks=(40, 9), block_size=4, max_model_len=150)
    record = harness.add(make_request("a", 100, ignore_eos=True, max_tokens=None))[0]
    harness.drain()
    assert len(record.output) == 50
    assert harness.scheduler.num_preemptions == 0


def test_newcomers_are_admitted_only_with_a_block_to_spare_for_each_running_sequence():
    harness = Harness(num_blocks=(8,), block_size=4)
    harness.add(make_request("a", 13, ignore_eos=True, max_tokens=20))
    harness.step()
    tight, roomy = make_request("b", 16, max_tokens=1), make_request("c", 12, max_tokens=1)  # 4 blocks are free
    for request, is_admitted in ((tight, False), (roomy, True)):
        record = harness.add(request)[0]
        harness.launch()
        assert (record.sequence.slot is not None) == is_admitted
        harness.land()
        harness.abort(request.request_id)


def test_a_step_must_have_a_row_of_logits_for_each_sequence():
    with pytest.raises(ConfigError, match=r"each of --max-num-seqs \(8\) sequences, got 7"):
        Scheduler(SchedulerConfig(max_num_seqs=8), GroupedPools([FULL], [4], 4), max_model_len=64, max_num_logit_rows=7)
