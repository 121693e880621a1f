"""A request on its way through the engine: its unfinished completions, and what is told once. No jax."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.completion import Completion
from jaxinfer.messages import ScheduledRequest, SeqId
from jaxinfer.request import CompletionOutput, FinishReason, GenerationRequest, PositionLogprobs, RequestDelta, RequestTimings


@dataclass(slots=True)
class Generation:
    """One accepted request. `first_seq_id` is the sequence of its completion 0, which computes what the completions share."""

    request: GenerationRequest
    first_seq_id: SeqId
    completions: dict[int, Completion]
    """The unfinished ones, by index."""
    timings: RequestTimings
    num_cached_tokens: int = 0
    is_finished: bool = False
    """Whether it has ended or was aborted."""
    _prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=lambda: [None])
    _is_announced: bool = False

    def note_scheduled(self, row: ScheduledRequest, now: float) -> None:
        """Take over what a row of a step about to run tells."""
        if self.timings.first_scheduled is None:
            self.timings.first_scheduled = now
            self.num_cached_tokens = row.num_cached_tokens
        self.timings.num_preemptions = max(self.timings.num_preemptions, row.generation)

    def add_prompt_logprobs(self, row: ScheduledRequest, logprobs: Sequence[PositionLogprobs]) -> None:
        """Those of the row's prompt positions. A row of an older request of the same name is left out."""
        if row.seq_id != self.first_seq_id:
            return
        for position, entry in zip(row.prompt_logprob_positions, logprobs, strict=True):
            # Positions come in order; one that is computed twice, after a preemption, counts once.
            if len(self._prompt_logprobs) == position + 1:
                self._prompt_logprobs.append(entry)

    def end(self, reason: FinishReason) -> list[CompletionOutput]:
        """End every unfinished completion for a reason that no token brought, with the text held back until now."""
        return [completion.end(reason) for completion in self.completions.values()]

    def delta(self, outputs: list[CompletionOutput], now: float) -> RequestDelta:
        """What is new, with what is told once where its time has come; completions that ended are dropped."""
        if self.timings.first_token is None and any(output.token_ids for output in outputs):
            self.timings.first_token = now
        for output in outputs:
            if output.finish_reason is not None:
                del self.completions[output.index]
        delta = RequestDelta(self.request.request_id, outputs, timings=self.timings)
        if not self._is_announced:
            self._is_announced = True
            delta.prompt_token_ids = self.request.prompt_token_ids
            delta.num_cached_tokens = self.num_cached_tokens
        # The first of the n completions computes them, but another one may be the first with a token.
        if self.request.params.prompt_logprobs is not None and len(self._prompt_logprobs) == len(self.request.prompt_token_ids):
            delta.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        if not self.completions:
            self.timings.finished = now
            self.is_finished = delta.is_finished = True
        return delta


class Deadlines:
    """When requests must have ended, the next first. Those that end in time are forgotten as they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, SeqId, Generation]] = []
        self._max_kept = 64

    def add(self, generation: Generation, timeouts: Sequence[float | None]) -> None:
        """Watch a request: the shortest of the timeouts counts, in seconds from its arrival; None is none."""
        if given := [timeout for timeout in timeouts if timeout is not None]:
            heapq.heappush(self._heap, (generation.timings.arrival + min(given), generation.first_seq_id, generation))
            if len(self._heap) > self._max_kept:  # a day's timeout must not keep a day's requests
                self._heap = [entry for entry in self._heap if not entry[2].is_finished]
                heapq.heapify(self._heap)
                self._max_kept = 2 * len(self._heap) + 64

    def pop_expired(self, now: float) -> list[Generation]:
        """The unfinished requests whose time is up; each comes once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            generation = heapq.heappop(self._heap)[2]
            if not generation.is_finished:
                expired.append(generation)
        return expired
