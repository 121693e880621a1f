"""Random lives of a scheduler over two KV groups; what is checked after every step stands in `replay.Harness`."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxinfer.errors import RequestError
from tests.scheduler.replay import FULL, STOP, Harness, make_request, window_group


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, stops and steps in any order, with results that land at once or a step later."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_blocks=st.tuples(st.integers(1, 14), st.integers(1, 14)),
        window=st.sampled_from([1, 3, 8, 32]),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 20),
        extra_rows=st.integers(0, 6),
        max_model_len=st.integers(2, 60),
    )
    def start(self, block_size, num_blocks, window, max_num_seqs, extra_tokens, extra_rows, max_model_len):
        self.harness = Harness(
            num_blocks=num_blocks,
            groups=(FULL, window_group(window)),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=max_model_len,
            max_num_logit_rows=max_num_seqs + extra_rows,
        )

    @precondition(lambda self: len(self.harness.living) < 12)
    @rule(
        count=st.integers(1, 3),
        size=st.integers(0, 1000),
        priority=st.integers(-1, 1),
        n=st.sampled_from([1, 1, 1, 3]),
        limits=st.tuples(st.integers(0, 4), st.none() | st.integers(4, 40)),
        ignore_eos=st.booleans(),
        has_stop_id=st.booleans(),
        prompt_logprobs=st.none() | st.just(1),
    )
    def add(self, count, size, priority, n, limits, ignore_eos, has_stop_id, prompt_logprobs):
        scheduler = self.harness.scheduler
        num_prompt_tokens = 1 + size % (scheduler.max_seq_tokens + 1)
        for _ in range(count):
            request = make_request(
                f"request {len(self.harness.records)}",
                num_prompt_tokens,
                priority=priority,
                n=n,
                min_tokens=limits[0],
                max_tokens=limits[1],
                ignore_eos=ignore_eos,
                stop_token_ids=(STOP,) if has_stop_id else (),
                prompt_logprobs=prompt_logprobs,
            )
            if num_prompt_tokens < scheduler.max_seq_tokens:
                self.harness.add(request)
                continue
            with pytest.raises(RequestError):
                scheduler.add(request)
            self.harness.check()

    @precondition(lambda self: self.harness.records)
    @rule(choice=st.integers(0, 10**6))
    def abort(self, choice):
        records = list(self.harness.records.values())
        self.harness.abort(records[choice % len(records)].request.request_id)

    @precondition(lambda self: self.harness.records)
    @rule(choice=st.integers(0, 10**6))
    def stop_string(self, choice):
        records = list(self.harness.records.values())
        self.harness.finish(records[choice % len(records)])

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.harness.step()

    @rule()
    def launch(self):
        self.harness.launch()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def land(self):
        self.harness.land()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.drain()


TestScheduler = SchedulerMachine.TestCase
# Shrinking a failure takes longer than a test may run; add Phase.shrink and a longer timeout to look closer at one.
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=60, derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate)
)
