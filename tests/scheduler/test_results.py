"""Steps that are planned before the results of earlier ones are known, and what those mean when they come."""

from __future__ import annotations

from jaxinfer.request import FinishReason
from jaxinfer.scheduler import StepOutput
from tests.scheduler.cases import EOS, make_request
from tests.scheduler.replay import Harness


def test_results_in_flight_of_a_preempted_sequence_count_and_it_waits_for_them():
    harness = Harness(num_blocks=(13,), block_size=4, max_num_seqs=2, max_num_batched_tokens=2)
    low = harness.add(make_request("low", 1, priority=1, ignore_eos=True, max_tokens=40))[0]
    while not low.output:
        harness.step()
    harness.add(make_request("high", 40, ignore_eos=True, max_tokens=2))
    harness.step()  # so that it is the second of each pair of launches that needs a new block
    while not low.num_preemptions:
        harness.launch()
        harness.launch()
        num_known, num_sampled = len(low.output), low.num_sampled
        is_waiting = harness.launch() is None or low.sequence.slot is None
        harness.land_all()
    assert is_waiting and num_sampled > num_known
    assert len(low.output) == num_sampled
    harness.drain()


def test_several_tokens_from_one_step_end_at_the_first_that_stops_and_the_rest_is_computed_next():
    harness = Harness()
    scheduler = harness.scheduler
    sequence = scheduler.add(make_request("a", 4))[0]
    output = scheduler.schedule()
    assert scheduler.update(output, StepOutput([[5, 6, 7]], [["five", "six", "seven"]]))[0].logprobs == ["five", "six", "seven"]
    output = scheduler.schedule()
    assert (output.scheduled[0].token_ids, output.scheduled[0].num_computed_tokens) == ([5, 6, 7], 4)
    (update,) = scheduler.update(output, StepOutput([[8, EOS, 9]], [["eight", "eos", "nine"]]))
    assert (update.token_ids, update.logprobs, update.finish_reason) == ([8, EOS], ["eight", "eos"], FinishReason.STOP)
    assert sequence.token_ids[4:] == [5, 6, 7, 8, EOS]
    scheduler.check()


def test_planning_runs_ahead_with_tokens_that_only_the_device_knows():
    harness = Harness(block_size=4, max_num_batched_tokens=8)
    record = harness.add(make_request("a", 6, max_tokens=4, ignore_eos=True))[0]
    rows = [harness.launch().scheduled[0] for _ in range(4)]
    assert [(row.num_computed_tokens, row.token_ids[-1], row.is_fed_back) for row in rows[1:]] == [(6 + i, 0, True) for i in range(3)]
    assert [row.num_output_tokens for row in rows] == [0, 1, 2, 3]
    assert harness.launch() is None  # it may not have more tokens
    harness.land()
    assert len(record.output) == 1
    harness.land_all()
    assert record.ends == [FinishReason.LENGTH]
    harness.drain()


def test_a_sequence_that_bans_words_waits_for_each_token_to_be_known():
    harness = Harness()
    harness.add(make_request("a", 6, max_tokens=4, ignore_eos=True, bad_words=("word",)))
    assert harness.launch() is not None
    assert harness.launch() is None
    harness.land()
    row = harness.launch().scheduled[0]
    assert row.token_ids != [0] and not row.is_fed_back
    harness.drain()


def test_a_step_planned_ahead_of_the_end_of_its_sequence_concerns_nobody():
    harness = Harness()
    record = harness.add(make_request("a", 6, ignore_eos=True))[0]
    harness.launch()
    harness.launch()
    harness.finish(record)
    other = harness.add(make_request("b", 6, max_tokens=3, ignore_eos=True))[0]
    harness.launch()
    harness.land_all()
    assert not record.output and len(other.output) == 1
    harness.drain()
