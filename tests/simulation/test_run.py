"""The event loop around the real scheduler: what takes how long, who ends, what is found again."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from jaxinfer.request import FinishReason
from jaxinfer.simulation.options import TraceOptions
from jaxinfer.simulation.timing import H200_LLAMA_8B, Timing
from jaxinfer.simulation.traces import TraceRequest
from tests.simulation.running import ONE_SECOND, GivenTrace, Noting, changed, run, simulation

TINY = Timing(
    flops_per_token=2,
    flops_per_pair=1,
    flops_per_second=4,
    weight_bytes=8,
    kv_bytes_per_token=1,
    memory_bytes_per_second=2,
    overhead_seconds=0.25,
    host_seconds=0.125,
    host_link_bytes_per_second=1,
    disk_bytes_per_second=1,
    kv_memory_bytes=1000,
)
TWO = [TraceRequest(0.0, (5, 6, 7), 2), TraceRequest(1.0, (8, 9), 2)]
PLAIN: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64, "block_size": 4, "num_kv_blocks": 32}
BARE = {"prefix_caching": "off", "host_kv_bytes": 0}


def ends(one: Any) -> list[tuple[TraceRequest, FinishReason, float, int]]:
    assert isinstance(one.recorder, Noting)
    return one.recorder.ends


def test_two_requests_take_three_steps_whose_times_are_the_formula() -> None:
    """One step after the other: each takes the longer of computing and reading, the overhead and the host's part."""
    # 1: three prompt tokens of the first request, with 1 + 2 + 3 pairs; KV of 3 tokens is read.
    first = max((3 * 2 + 6 * 1) / 4, (8 + 3) / 2) + 0.25 + 0.125
    # 2: its second token behind 3 others (4 pairs), and two prompt tokens of the second request (1 + 2 pairs); 4 + 2 are read.
    second = max((3 * 2 + 7 * 1) / 4, (8 + 6) / 2) + 0.25 + 0.125
    # 3: the second request's second token.
    third = max((1 * 2 + 3 * 1) / 4, (8 + 3) / 2) + 0.25 + 0.125
    assert (first, second, third) == (5.875, 7.375, 5.875)
    one = simulation(GivenTrace(TWO), TINY, **PLAIN, **BARE, async_scheduling="off")
    recorder = one.run()
    assert [(now, count) for _, _, now, count in ends(one)] == [(first + second, 2), (first + second + third, 2)]
    assert recorder.num_steps == 3
    assert recorder.first_token.total == first + (first + second - 1)
    assert recorder.first_token.largest == first + second - 1
    assert recorder.per_token.total == second + third
    assert recorder.end_to_end.total == first + second + (first + second + third - 1)
    assert recorder.wait.total == first - 1  # the second one came a second after the first step had begun
    assert recorder.num_computed_tokens == 3 + 3 + 1
    assert recorder.num_discarded_tokens == recorder.num_recomputed_tokens == 0


def test_one_step_ahead_the_host_is_hidden_and_one_token_each_is_computed_in_vain() -> None:
    # Steps are planned before the last one's tokens are known, so that each answer is in one step too many.
    steps = [
        (8 + 3) / 2,  # the first prompt
        (8 + 4) / 2,  # planned at once, when nobody else was there
        (8 + 5 + 2) / 2,  # the first request in vain; the second one's prompt
        (8 + 3) / 2,
        (8 + 4) / 2,  # in vain
    ]
    seconds = [step + 0.25 for step in steps]
    one = simulation(GivenTrace(TWO), TINY, **PLAIN, **BARE)
    recorder = one.run()
    assert [now for _, _, now, _ in ends(one)] == [sum(seconds[:2]), sum(seconds[:4])]
    assert recorder.num_steps == 5
    assert recorder.num_discarded_tokens == 2
    assert recorder.num_recomputed_tokens == 0
    assert recorder.last_end_seconds == sum(seconds[:4])


def test_a_long_host_part_counts_where_it_is_longer_than_the_step() -> None:
    slow_host = changed(TINY, host_seconds=10)
    one = simulation(GivenTrace(TWO[:1]), slow_host, **PLAIN, **BARE)
    one.run()
    assert ends(one)[0][2] == 20


def test_idle_time_is_skipped() -> None:
    one = simulation(GivenTrace([TWO[0], TraceRequest(1e6, (8, 9), 2)]), ONE_SECOND, **PLAIN, **BARE, async_scheduling="off")
    recorder = one.run()
    assert [now for _, _, now, _ in ends(one)] == [pytest.approx(2), pytest.approx(1e6 + 2)]
    assert recorder.num_steps == 4


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"num_kv_blocks": 2000},
    "swap": {"num_kv_blocks": 70, "preemption": "swap"},
    "recompute": {"num_kv_blocks": 70, "preemption": "recompute", "prefix_caching": "off"},
    "no host": {"num_kv_blocks": 70, "host_kv_bytes": 0},
    "fair": {"num_kv_blocks": 70, "scheduling_policy": "fair"},
    "sync": {"num_kv_blocks": 70, "async_scheduling": "off", "scheduling_policy": "fcfs"},
    "small host": {"num_kv_blocks": 70, "host_kv_bytes": 40 * 16 * 131_072, "simulated_disk": "on"},
    "chunks": {"num_kv_blocks": 140, "long_prefill_token_threshold": 32, "max_num_partial_prefills": 1},
}


@pytest.mark.parametrize("trace", ["sharegpt", "documents", "agents"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_request_ends_once_with_its_length_and_no_block_is_lost(setting: str, trace: Any) -> None:
    scale = {"max_prompt_len": 200, "max_output_len": 300}
    own = {"agents": {"turns": 4, "system_prompt_len": 200, "think_seconds": 0.1}}.get(trace, {})
    asked = TraceOptions(trace=trace, num_requests=40, request_rate=500.0, **scale, **own)
    one = simulation(asked, max_num_seqs=24, max_num_batched_tokens=256, max_model_len=1024, **SETTINGS[setting])
    one._on_progress = lambda done, total: one.scheduler.check()
    recorder = one.run()
    one.scheduler.check()
    done = ends(one)
    assert [(reason, request.num_output_tokens) for request, reason, _, _ in done] == [(FinishReason.STOP, count) for *_, count in done]
    assert len({id(request) for request, *_ in done}) == len(done) == 40
    pool = one.scheduler.pools.pools[0]
    assert pool.num_held == 0
    assert pool.num_free + pool.num_cached == pool.num_blocks
    # What was computed is what was needed, what was computed again, and what was computed in vain.
    needed = sum(len(request.prompt_token_ids) + request.num_output_tokens - 1 for request, *_ in done) - recorder.num_cached_tokens
    assert recorder.num_computed_tokens == needed + recorder.num_recomputed_tokens + recorder.num_discarded_tokens
    assert recorder.num_recomputed_tokens >= 0
    if setting == "recompute" and trace == "sharegpt":
        assert recorder.num_recomputed_tokens > 0
    if setting == "swap" and trace == "sharegpt":
        assert one.scheduler.counters.num_preemptions_swap > 0
        assert recorder.num_recomputed_tokens == 0
    assert not one._live and not one._num_outputs and not one._deadlines


def test_a_deadline_ends_who_waits_and_who_runs() -> None:
    """Steps of a second; one sequence at a time: the first runs into its deadline, the second never starts, the third has time."""
    requests = [TraceRequest(0.0, (5, 6, 7), 50), TraceRequest(0.2, (5, 6), 2), TraceRequest(30.0, (5, 6), 2)]
    one = simulation(GivenTrace(requests), ONE_SECOND, **PLAIN | {"max_num_seqs": 1}, **BARE, async_scheduling="off", request_timeout=10.5)
    recorder = one.run()
    assert [(reason, pytest.approx(now), count) for _, reason, now, count in ends(one)] == [
        (FinishReason.TIMEOUT, 11, 11),
        (FinishReason.TIMEOUT, 11, 0),
        (FinishReason.STOP, 32, 2),
    ]
    assert recorder.end_to_end.num_samples == 1
    one.scheduler.check()


def test_what_can_never_run_is_refused_and_counted() -> None:
    one = simulation(GivenTrace([TraceRequest(0.0, tuple(range(2, 80)), 2), TWO[1]]), TINY, **PLAIN)
    recorder = one.run()
    assert recorder.num_refused == 1
    assert len(ends(one)) == 1


def test_an_answer_ends_where_the_context_does() -> None:
    one = simulation(GivenTrace([TraceRequest(0.0, (5, 6, 7), 500)]), TINY, **PLAIN)
    one.run()
    assert [(reason, count) for _, reason, _, count in ends(one)] == [(FinishReason.LENGTH, 61)]


def test_a_prefix_comes_back_from_host_memory_at_the_links_speed() -> None:
    """A prompt of four full blocks, another one that takes all eight blocks, and the first one again with a new last token."""
    requests = [
        TraceRequest(0.0, tuple(range(100, 117)), 1),
        TraceRequest(1000.0, tuple(range(200, 229)), 1),
        TraceRequest(2000.0, (*range(100, 116), 99), 1),
    ]
    timing = changed(TINY, flops_per_token=10, flops_per_pair=0, flops_per_second=1, weight_bytes=1e-9, memory_bytes_per_second=1e12)
    timing = changed(timing, overhead_seconds=0, host_seconds=0, host_link_bytes_per_second=0.5)
    one = simulation(GivenTrace(requests), timing, **PLAIN | {"num_kv_blocks": 8, "max_num_batched_tokens": 64})
    one.run()
    assert one.scheduler.counters.num_hit_tokens_host == 16
    fetch, last_token = 16 * 1 / 0.5, 10
    assert [now for *_, now, _ in ends(one)] == [pytest.approx(170), pytest.approx(1290), pytest.approx(2000 + fetch + last_token)]


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    def figures(seed: int) -> dict[str, Any]:
        asked = TraceOptions(num_requests=40, trace_seed=seed, request_rate=100.0, max_output_len=100)
        return run(asked, num_kv_blocks=100, max_model_len=1024, scheduling_policy="fair").figures

    first = figures(1)
    assert figures(1) == first
    assert figures(2) != first


def test_agents_find_what_arithmetic_says_when_the_pool_is_large() -> None:
    """Each turn finds the full blocks of the turn before it; the first turn of all but the first conversation those of the prompt."""
    block, system = 16, 100
    asked = TraceOptions(trace="agents", num_requests=60, turns=5, system_prompt_len=system, max_prompt_len=150, max_output_len=150)
    one = simulation(asked, num_kv_blocks=20_000, max_num_seqs=64, async_scheduling="off", host_kv_bytes=0)
    one.run()
    turns: dict[int, list[TraceRequest]] = defaultdict(list)
    for request, *_ in ends(one):
        turns[request.conversation].append(request)
    assert [len(of_one) for of_one in turns.values()] == [5] * 12
    expected = (len(turns) - 1) * (system // block * block)
    for of_one in turns.values():
        of_one.sort(key=lambda request: request.turn)
        # The last token of an answer is never computed.
        expected += sum((len(before.prompt_token_ids) + before.num_output_tokens - 1) // block * block for before in of_one[:-1])
    assert one.scheduler.counters.num_hit_tokens_device == expected
    assert one.recorder.num_cached_tokens == expected


def test_a_fair_policy_serves_users_more_equally() -> None:
    """One user sends far more than the others, all at once and in front of them."""
    asked = TraceOptions(num_requests=200, arrivals="at-once", num_users=4, user_skew=2.0, max_output_len=400)
    same: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 1000, "max_num_batched_tokens": 512}
    slow = changed(H200_LLAMA_8B, overhead_seconds=0.03)  # so that the run has several windows
    first_come, fair = (run(asked, slow, **same, scheduling_policy=policy).figures["fairness_index"] for policy in ("fcfs", "fair"))
    assert fair > 0.9
    assert first_come < fair - 0.1
