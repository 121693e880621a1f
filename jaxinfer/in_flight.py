"""A step that has been launched, and its results as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from jaxinfer.batching import LogitRow
from jaxinfer.messages import SchedulerOutput, StepOutput
from jaxinfer.request import PositionLogprobs, TokenLogprob
from jaxinfer.sampling import SampleResult


@dataclass(slots=True)
class InFlightStep:
    """A launched step; `result` waits for it."""

    output: SchedulerOutput
    rows: list[LogitRow]
    logits: Float32[Array, "M V"]
    sampled: Int32[Array, "M"] | SampleResult

    def result(self) -> StepOutput:
        """The tokens and log-probabilities, on the host."""
        if isinstance(self.sampled, SampleResult):
            return self._full_result(jax.device_get(self.sampled))
        tokens = np.asarray(self.sampled).tolist()
        step = StepOutput([[] for _ in self.output.scheduled])
        for index, row in enumerate(self.rows):
            step.token_ids[row.row].append(tokens[index])
        return step

    def _full_result(self, sampled: SampleResult) -> StepOutput:
        count = len(self.output.scheduled)
        logprobs: list[list[PositionLogprobs] | None] = [None] * count
        prompt_logprobs: list[list[PositionLogprobs]] = [[] for _ in range(count)]
        step = StepOutput([[] for _ in range(count)], logprobs, prompt_logprobs)
        for index, row in enumerate(self.rows):
            params = self.output.scheduled[row.row].params
            if row.is_sampling:
                step.token_ids[row.row].append(int(sampled.token_ids[index]))
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
