"""A step that has been launched, and its results as plain values."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jaxtyping import Array, Int32

from jaxinfer.batching import LogitRow
from jaxinfer.messages import SchedulerOutput, StepOutput
from jaxinfer.request import PositionLogprobs, TokenLogprob
from jaxinfer.sampling import SampleResult


class InFlightStep:
    """A launched step: its results begin their way to the host as soon as they exist, and `result` waits for them."""

    def __init__(self, output: SchedulerOutput, rows: Sequence[LogitRow], sampled: Int32[Array, "M"] | SampleResult):
        self.output = output
        self._rows = rows
        self._sampled = sampled
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()

    @property
    def is_ready(self) -> bool:
        """Whether the device has computed it; never waits."""
        return all(array.is_ready() for array in jax.tree.leaves(self._sampled))

    def wait(self) -> None:
        """Return when the device has computed it."""
        jax.block_until_ready(self._sampled)

    def result(self) -> StepOutput:
        """The tokens and log-probabilities, on the host."""
        sampled = jax.device_get(self._sampled)
        if isinstance(sampled, SampleResult):
            return self._full_result(sampled)
        step = StepOutput([[] for _ in self.output.scheduled])
        for row, token_id in zip(self._rows, sampled.tolist(), strict=False):  # padding rows come last
            step.token_ids[row.row].append(token_id)
        return step

    def _full_result(self, sampled: SampleResult) -> StepOutput:
        count = len(self.output.scheduled)
        logprobs: list[list[PositionLogprobs] | None] = [None] * count
        prompt_logprobs: list[list[PositionLogprobs]] = [[] for _ in range(count)]
        step = StepOutput([[] for _ in range(count)], logprobs, prompt_logprobs)
        token_ids = sampled.token_ids.tolist()
        for index, row in enumerate(self._rows):
            params = self.output.scheduled[row.row].params
            if row.is_sampling:
                step.token_ids[row.row].append(token_ids[index])
                if params.logprobs is not None:
                    logprobs[row.row] = [position_logprobs(sampled, index, params.logprobs)]
            else:
                prompt_logprobs[row.row].append(position_logprobs(sampled, index, params.prompt_logprobs or 0))
        return step


def position_logprobs(sampled: SampleResult, index: int, num_top: int) -> PositionLogprobs:
    """One row of a SampleResult on the host as plain values."""
    chosen = TokenLogprob(int(sampled.token_ids[index]), float(sampled.logprob[index]), int(sampled.rank[index]))
    ids, logprobs = sampled.top_ids[index, :num_top].tolist(), sampled.top_logprobs[index, :num_top].tolist()
    top = tuple(TokenLogprob(token_id, logprob, rank + 1) for rank, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)))
    return PositionLogprobs(chosen, top)
