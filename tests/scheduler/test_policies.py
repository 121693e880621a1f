"""Who runs next, and how the tokens of a step are shared out."""

from __future__ import annotations

import pytest

from jaxinfer.errors import RequestError
from tests.scheduler.cases import make_request
from tests.scheduler.replay import Harness


def row_of(output, record):
    return next((row for row in output.scheduled if row.seq_id == record.sequence.seq_id), None)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_priority_is_refused_where_it_would_mean_nothing(policy):
    harness = Harness(scheduling_policy=policy)
    with pytest.raises(RequestError, match=f"priority must be 0 with --scheduling-policy {policy}, got 1") as error:
        harness.scheduler.add(make_request("a", 3, priority=1))
    assert error.value.param == "priority"
    harness.add(make_request("a", 3))
    harness.drain()


def test_first_come_first_served():
    harness = Harness(scheduling_policy="fcfs", max_num_seqs=1)
    records = [harness.add(make_request(str(i), 3, user="ab"[i % 2], max_tokens=2))[0] for i in range(4)]
    order = []
    while harness.scheduler.has_work:
        order += [row.seq_id for row in harness.step().scheduled if row.is_first_of_slot]
    assert order == [record.sequence.seq_id for record in records]


def test_the_fair_policy_lets_a_light_user_through_the_queue_of_a_heavy_one():
    harness = Harness(scheduling_policy="fair", max_num_seqs=1)
    for i in range(8):
        harness.add(make_request(f"heavy {i}", 8, user="heavy", max_tokens=4, ignore_eos=True))
    harness.step()
    light = [harness.add(make_request(f"light {i}", 4, user="light", max_tokens=2, ignore_eos=True))[0] for i in range(2)]
    order = []
    while harness.scheduler.has_work:
        order += [row.request_id for row in harness.step().scheduled if row.is_first_of_slot]
    # The light user came when the heavy one had been served 8 tokens, and is lifted to that. One of its requests takes 5, one
    # of the other's 11: the counters (light, heavy) go (8, 11), (13, 11), (13, 22).
    assert order[:3] == ["light 0", "heavy 1", "light 1"]
    assert len(order) == 9 and all(record.ends for record in light)


def test_a_long_prompt_takes_no_more_of_a_step_than_its_threshold():
    harness = Harness(long_prefill_token_threshold=5, max_num_batched_tokens=16, max_num_seqs=4)
    long = harness.add(make_request("long", 20, max_tokens=3, ignore_eos=True))[0]
    short = harness.add(make_request("short", 4, max_tokens=3, ignore_eos=True))[0]
    other = harness.add(make_request("other", 9, max_tokens=3, ignore_eos=True))[0]
    output = harness.step()
    assert [len(row_of(output, record).token_ids) for record in (long, short, other)] == [5, 4, 5]
    output = harness.step()
    assert [len(row_of(output, record).token_ids) for record in (long, short, other)] == [5, 1, 4]
    harness.drain()


def test_only_so_many_prompts_are_computed_in_parts_at_a_time():
    harness = Harness(max_num_partial_prefills=1, long_prefill_token_threshold=5, max_num_batched_tokens=16)
    first, second = (harness.add(make_request(name, 12, max_tokens=3, ignore_eos=True))[0] for name in ("first", "second"))
    outputs = [harness.step() for _ in range(3)]
    assert [len(row_of(output, first).token_ids) for output in outputs] == [5, 5, 2]
    assert [row_of(output, second) is None for output in outputs] == [True, True, False]
    short = harness.add(make_request("short", 4, max_tokens=3, ignore_eos=True))[0]
    assert row_of(harness.step(), short) is not None  # computed whole
    harness.drain()
