"""Random use of the scheduler and all its memory; what is checked after every step stands in `replay.Harness`.

Most steps are drawn by a seeded generator, at a tenth of what hypothesis costs; hypothesis drives the same events where a
failure should be shrunk to a few of them.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.scheduler.random_run import SETTINGS, RandomRun

NUMBERS = range(len(SETTINGS))


@pytest.mark.parametrize("number", NUMBERS)
def test_random_steps(number):
    RandomRun(SETTINGS[number], seed=number).run(4_000)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_million_random_steps(number):
    for seed in range(7):
        RandomRun(SETTINGS[number], seed=1_000 + seed).run(6_000)


class SchedulerMachine(RuleBasedStateMachine):
    """The events of a RandomRun in an order that hypothesis draws."""

    @initialize(number=st.sampled_from(NUMBERS), seed=st.integers(0, 99))
    def start(self, number, seed):
        self.run = RandomRun(SETTINGS[number], seed)

    @rule(seed=st.integers(0, 999))
    def add(self, seed):
        self.run.random = random.Random(seed)
        self.run.add()

    @rule(seed=st.integers(0, 9))
    def abort(self, seed):
        self.run.random = random.Random(seed)
        self.run.abort()

    @rule(seed=st.integers(0, 9))
    def stop_string(self, seed):
        self.run.random = random.Random(seed)
        self.run.stop()

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.run.harness.step()

    @precondition(lambda self: len(self.run.harness.in_flight) < 4)
    @rule()
    def launch(self):
        self.run.harness.launch()

    @precondition(lambda self: self.run.harness.in_flight)
    @rule()
    def land(self):
        self.run.harness.land()

    @precondition(lambda self: self.run.harness.device.outstanding)
    @rule(choice=st.integers(0, 9))
    def acknowledge(self, choice):
        tickets = self.run.harness.device.outstanding
        self.run.harness.acknowledge(tickets[choice % len(tickets)])

    @precondition(lambda self: self.run.harness.device.lost)
    @rule()
    def lose(self):
        self.run.harness.report_lost()

    def teardown(self):
        if hasattr(self, "run"):
            self.run.harness.drain()


TestScheduler = SchedulerMachine.TestCase
# Shrinking a failure takes longer than a test may run; add Phase.shrink and a longer timeout to look closer at one.
TestScheduler.settings = settings(
    max_examples=40, stateful_step_count=60, derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate)
)
