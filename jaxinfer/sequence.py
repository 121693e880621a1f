"""One completion while it is being generated: the scheduler's own mutable state. No jax."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from jaxinfer.kv.block_pool import BlockTables
from jaxinfer.messages import NO_POSITIONS, SeqId
from jaxinfer.request import FinishReason, GenerationRequest, RequestStatus


class Sequence:
    """One of a request's `n` completions.

    `num_computed_tokens` is the only truth about progress: it chases `len(token_ids)`, falls back to 0 on preemption,
    and everything else (prefill, decode, what is sampled) follows from the two. `generation` counts restarts; rows of a
    step in flight that carry an older one are dropped.
    """

    __slots__ = (
        "blocks",
        "generation",
        "index",
        "is_new_in_slot",
        "num_computed_tokens",
        "num_prompt_logprobs_done",
        "num_prompt_tokens",
        "order",
        "params",
        "request_id",
        "seq_id",
        "slot",
        "status",
        "token_ids",
    )

    def __init__(self, request: GenerationRequest, index: int, seq_id: SeqId, blocks: BlockTables):
        self.seq_id = seq_id
        self.request_id = request.request_id
        self.index = index
        self.params = request.params
        self.order = (request.priority, seq_id)
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        # The logits at prompt position p score token p + 1, so there are num_prompt_tokens - 1 of them. The n answers
        # share a prompt: only the first one pays for its log-probabilities.
        wants_prompt_logprobs = request.params.prompt_logprobs is not None and index == 0
        self.num_prompt_logprobs_done = 0 if wants_prompt_logprobs else self.num_prompt_tokens - 1
        self.generation = 0
        self.slot: int | None = None
        self.is_new_in_slot = False
        self.blocks = blocks
        self.status = RequestStatus.WAITING

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far; they survive preemption."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def cut_to_rows(self, num_tokens: int, max_rows: int) -> int:
        """Most tokens, at most `num_tokens`, whose computation yields at most `max_rows` rows of logits."""
        start = self.num_computed_tokens
        end = start + num_tokens
        num_rows = 0
        if self.num_prompt_logprobs_done < self.num_prompt_tokens - 1:
            first = max(start, self.num_prompt_logprobs_done)
            num_rows = max(0, min(end, self.num_prompt_tokens - 1) - first)
            if num_rows > max_rows:
                return first + max_rows - start
        if end == len(self.token_ids) and num_rows + 1 > max_rows:
            end -= 1
        return end - start

    def prompt_logprob_positions(self, end: int) -> range:
        """Prompt positions below `end`, of those about to be computed, whose logits are wanted."""
        if self.num_prompt_logprobs_done >= self.num_prompt_tokens - 1:
            return NO_POSITIONS
        first = max(self.num_computed_tokens, self.num_prompt_logprobs_done)
        return range(first, max(first, min(end, self.num_prompt_tokens - 1)))

    def append(self, token_id: int, eos_token_ids: Collection[int], max_seq_tokens: int) -> tuple[FinishReason | None, int | None]:
        """Add a sampled token; return why that ends the sequence, if it does, and the stop token id asked for by the user.

        The token that ends a sequence stays in it. End-of-sequence and stop tokens count only after `min_tokens` others:
        the sampler masks them until then, this check does not rely on it.
        """
        params = self.params
        self.token_ids.append(token_id)
        if self.num_output_tokens > params.min_tokens:
            if token_id in eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
        if len(self.token_ids) >= max_seq_tokens:
            return FinishReason.LENGTH, None
        if params.max_tokens is not None and self.num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None


class WaitingQueue:
    """Sequences without a slot, by (priority, arrival): O(log n) to add and to take the first, whatever waits.

    One that ends while it waits is told by its status: it stays where it is until it comes to the front or the ended
    are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def push(self, seq: Sequence) -> None:
        """Add a sequence; a preempted one comes in front of all that arrived after it."""
        heapq.heappush(self._heap, (seq.order, seq))

    def head(self) -> Sequence | None:
        """The next in order, None when nobody waits."""
        while self._heap and self._heap[0][1].is_finished:
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take away what `head` returned."""
        heapq.heappop(self._heap)

    def note_end(self) -> None:
        """Note that one of the waiting has ended."""
        self._num_ended += 1
        if self._num_ended > len(self) + 64:
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)
            self._num_ended = 0
