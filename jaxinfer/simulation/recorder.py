"""Watches a simulation and keeps what the report needs, in memory that does not grow with finished requests."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass

from jaxinfer.messages import ScheduledRequest
from jaxinfer.request import FinishReason
from jaxinfer.sequence import Sequence
from jaxinfer.simulation.statistics import Fairness, Histogram, TimeSeries
from jaxinfer.simulation.traces import TraceRequest

FAIRNESS_WINDOW_SECONDS = 5.0


@dataclass(slots=True)
class LiveRequest:
    """One unfinished request, and what the scheduler knows of it."""

    request: TraceRequest
    seq: Sequence
    started_seconds: float | None = None
    """When it was in a step for the first time."""
    first_token_seconds: float | None = None
    num_credited: int = 0
    """Tokens that its user has been credited with."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What the KV pool holds at one moment, in tokens it has room for."""

    held: int
    cached: int
    wasted: int
    """Of those held, without a token in them."""


SERIES = ("seconds", "waiting", "running", "held", "cached", "wasted")
"""Columns of the time series; the last three are in tokens."""


class Recorder:
    """Counts. Times are seconds of simulated time."""

    def __init__(self) -> None:
        self.first_token = Histogram()
        self.per_token = Histogram()
        self.end_to_end = Histogram()
        self.wait = Histogram()
        self.fairness = Fairness(FAIRNESS_WINDOW_SECONDS)
        self.series = TimeSeries()
        self.num_ended: dict[FinishReason, int] = {}
        self.num_refused = 0
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_discarded_tokens = 0
        self.num_useful_tokens = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.busy_seconds = 0.0
        self.max_waiting = 0
        self.last_end_seconds = 0.0

    def arrived(self, live: LiveRequest) -> None:
        """A request is queued."""
        self.fairness.arrived(live.request.user, live.request.arrival_seconds)

    def first_row(self, live: LiveRequest, start: float) -> None:
        """A request is in a step for the first time, which began at `start`."""
        live.started_seconds = start
        self.wait.add(start - live.request.arrival_seconds)

    def first_sampled(self, live: LiveRequest, now: float) -> None:
        """A request has got its first token."""
        live.first_token_seconds = now
        self.first_token.add(now - live.request.arrival_seconds)

    def ended(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        """A request has ended."""
        seq = live.seq
        self.last_end_seconds = now
        self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
        self.credit(live)
        self.fairness.ended(live.request.user)
        self.num_output_tokens += seq.num_output_tokens
        if live.started_seconds is not None:
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_cached_tokens += seq.num_cached_tokens
        if reason is FinishReason.TIMEOUT:
            self.num_useful_tokens += max(0, seq.num_computed_tokens - seq.num_cached_tokens)
            return
        # The last token is sampled and never fed; with async scheduling a step in flight may have computed it in vain.
        num_needed = len(seq.token_ids) - 1
        self.num_useful_tokens += num_needed - seq.num_cached_tokens
        self.num_discarded_tokens += max(0, seq.num_computed_tokens - num_needed)
        self.end_to_end.add(now - live.request.arrival_seconds)
        if seq.num_output_tokens > 1 and live.first_token_seconds is not None:
            self.per_token.add((now - live.first_token_seconds) / (seq.num_output_tokens - 1))

    def credit(self, live: LiveRequest) -> None:
        """Tell fairness what a request has got since the last time; prompts count with the first token."""
        if live.seq.num_output_tokens:
            total = len(live.seq.token_ids)
            self.fairness.serve(live.request.user, total - live.num_credited)
            live.num_credited = total

    def sample(self, start: float, seconds: float, num_waiting: int, num_running: int, use: PoolUse) -> None:
        """Keep the state of a step that begins at `start` and takes `seconds`."""
        self.series.add(start, (seconds, num_waiting, num_running, use.held, use.cached, use.wasted))

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens that were computed again, or for nothing, because a sequence had to give up its blocks."""
        return self.num_computed_tokens - self.num_discarded_tokens - self.num_useful_tokens


def wasted_tokens(rows: collections.abc.Sequence[ScheduledRequest], group: int, block_size: int) -> int:
    """Room in the blocks that the rows of a step hold behind the tokens computed by then, its own included."""
    held = sum(len(row.block_ids[group]) for row in rows) * block_size
    return held - sum(row.num_computed_tokens + len(row.token_ids) for row in rows)
