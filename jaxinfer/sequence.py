"""One completion while it is being generated: the scheduler's own mutable state. No jax."""

from __future__ import annotations

from collections.abc import Collection

from jaxinfer.kv.kv_map import SequenceBlocks
from jaxinfer.kv.prefix import BlockKey, PrefixNode, PrefixRoot
from jaxinfer.kv.tables import BlockTables
from jaxinfer.kv.tiers import PendingFetch, SwappedBlocks
from jaxinfer.messages import NO_POSITIONS, SeqId
from jaxinfer.request import FinishReason, GenerationRequest, RequestStatus

NEVER = 2**62


class Sequence:
    """One of a request's `n` completions.

    `num_computed_tokens` is the only truth about progress: it chases `num_tokens`, falls back on preemption, and everything
    else (prefill, decode, what is sampled) follows from the two. `token_ids` are those the host knows; `num_pending` more are
    being sampled by steps in flight.
    """

    __slots__ = (
        "block_keys",
        "blocks",
        "cache_salt",
        "fetch",
        "followers",
        "fork_index",
        "fork_of",
        "generation",
        "has_started",
        "index",
        "is_new_in_slot",
        "leader",
        "max_num_tokens",
        "next_publish",
        "nodes",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_launched_tokens",
        "num_pending",
        "num_prompt_logprobs_done",
        "num_prompt_tokens",
        "order",
        "params",
        "plain_until",
        "request_id",
        "root",
        "seq_id",
        "slot",
        "status",
        "stop_token_ids",
        "swapped",
        "token_ids",
        "user",
        "waits_for_tokens",
    )

    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        seq_id: SeqId,
        blocks: BlockTables,
        *,
        max_seq_tokens: int,
        root: PrefixRoot | None = None,
    ):
        self.seq_id = seq_id
        self.request_id = request.request_id
        self.index = index
        self.params = request.params
        self.user = request.user
        self.cache_salt = request.cache_salt
        self.order = (request.priority, seq_id)
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = request.params.max_tokens
        self.max_num_tokens = max_seq_tokens if max_tokens is None else min(max_seq_tokens, self.num_prompt_tokens + max_tokens)
        """Where it ends, whatever is sampled."""
        # What is banned next may depend on the token that nobody has seen yet.
        self.waits_for_tokens = bool(request.params.bad_words)
        self.stop_token_ids = request.params.stop_token_ids
        self.num_computed_tokens = 0
        self.num_launched_tokens = 0
        """Computed by steps before the last one it was in: what a copy made before the next step finds in its blocks."""
        self.num_pending = 0
        self.num_in_flight = 0
        """Steps that have been planned with it and have not come back."""
        # The logits at prompt position p score token p + 1, so there are num_prompt_tokens - 1 of them. The n answers
        # share a prompt: only the first one pays for its log-probabilities.
        wants_prompt_logprobs = request.params.prompt_logprobs is not None and index == 0
        self.num_prompt_logprobs_done = 0 if wants_prompt_logprobs else self.num_prompt_tokens - 1
        self.plain_until = 0
        """Positions below this one need no thought: nothing ends there or waits for the host."""
        self.generation = 0
        """How often it has been preempted."""
        self.slot: int | None = None
        self.is_new_in_slot = False
        self.blocks = blocks
        self.status = RequestStatus.WAITING
        self.root = root
        self.block_keys: list[BlockKey] = []
        """Key and tokens of its full blocks, as far as they were needed."""
        self.nodes: list[PrefixNode] = []
        """Where its full computed blocks stand in the prefix index."""
        self.next_publish = 0 if root is not None else NEVER
        """Computed tokens with which one more block is full and not in the index yet."""
        self.has_started = False
        self.num_cached_tokens = 0
        self.fetch: PendingFetch | None = None
        self.swapped: SwappedBlocks | None = None
        self.fork_of, self.fork_index = request.fork_of, request.fork_index
        self.leader: Sequence | None = None
        """The first of the n answers, while this one waits for it to compute the prompt."""
        self.followers: list[Sequence] = []

    @property
    def num_tokens(self) -> int:
        """All tokens, those being sampled included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far and known; they survive preemption."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def may_advance(self) -> bool:
        """Whether another step makes sense before the tokens being sampled are known."""
        return not self.num_pending or (self.num_tokens < self.max_num_tokens and not self.waits_for_tokens)

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
        if end == self.num_tokens and num_rows + 1 > max_rows:
            end -= 1
        return end - start

    def prompt_logprob_positions(self, end: int) -> range:
        """Prompt positions below `end`, of those about to be computed, whose logits are wanted."""
        if self.num_prompt_logprobs_done >= self.num_prompt_tokens - 1:
            return NO_POSITIONS
        first = max(self.num_computed_tokens, self.num_prompt_logprobs_done)
        return range(first, max(first, min(end, self.num_prompt_tokens - 1)))

    def append(self, token_id: int, eos_token_ids: Collection[int]) -> tuple[FinishReason | None, int | None]:
        """Add a sampled token; return why that ends the sequence, if it does, and the stop token id asked for by the user.

        The token that ends a sequence stays in it. End-of-sequence and stop tokens count only after `min_tokens` others:
        the sampler masks them until then, this check does not rely on it.
        """
        token_ids = self.token_ids
        token_ids.append(token_id)
        if token_id in eos_token_ids or token_id in self.stop_token_ids:
            params = self.params
            if self.num_output_tokens > params.min_tokens:
                if token_id in eos_token_ids and not params.ignore_eos:
                    return FinishReason.STOP, None
                if token_id in self.stop_token_ids:
                    return FinishReason.STOP, token_id
        if len(token_ids) >= self.max_num_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def picture(self) -> SequenceBlocks:
        """What people may see of it."""
        state = "fetching" if self.fetch else "running" if self.slot is not None else "swapped" if self.swapped else "waiting"
        return SequenceBlocks(
            request_id=self.request_id,
            index=self.index,
            state=state,
            num_tokens=self.num_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.num_cached_tokens,
            block_ids=tuple(self.blocks.held(0)),
        )
