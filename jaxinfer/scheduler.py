"""Which tokens of which sequences the next step computes, and what its results mean. No jax.

There are no phases. A sequence has a number of computed tokens that chases its number of tokens; chunked prefill,
decode and the recomputation after preemption are this one rule.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection
from operator import attrgetter

from jaxinfer.config import SchedulerConfig
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.kv.block_pool import GroupedPools
from jaxinfer.messages import ScheduledRequest, SchedulerOutput, SeqId, SequenceUpdate, StepOutput
from jaxinfer.request import FinishReason, GenerationRequest, RequestId, RequestStatus
from jaxinfer.sequence import Sequence, WaitingQueue

_order = attrgetter("order")


class Scheduler:
    """Continuous batching over a block pool per KV group, first come first served within a priority.

    `schedule()` and `update()` alternate. `schedule()` may also be called again before `update()`: sequences whose
    last token is still being sampled are left out, the others advance.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: GroupedPools,
        *,
        max_model_len: int,
        max_num_logit_rows: int,
        eos_token_ids: Collection[int] = (),
    ):
        if max_num_logit_rows < config.max_num_seqs:
            raise ConfigError(
                f"a step must have a row of logits for each of --max-num-seqs ({config.max_num_seqs}) sequences, got {max_num_logit_rows}",
                option="--max-num-seqs",
            )
        self.config = config
        self.pools = pools
        self.max_num_logit_rows = max_num_logit_rows
        self.max_seq_tokens = min(max_model_len, pools.max_seq_tokens or max_model_len)
        """Most tokens of one sequence, prompt and output: what the context and the pools with nobody else in them hold.

        Sequences end there by this number and not by what others hold, so company changes when, never what.
        """
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.num_preemptions = 0
        self._next_seq_id = 0
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._sequences: dict[SeqId, Sequence] = {}
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._preempted: list[SeqId] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not, preempted ones included."""
        return len(self._waiting)

    @property
    def num_kv_tokens(self) -> int:
        """Computed tokens of running sequences; against held blocks x block size this tells the waste."""
        return sum(seq.num_computed_tokens for seq in self._running)

    def check_fits(self, request: GenerationRequest) -> None:
        """Refuse what can never run.

        Raises:
            RequestError: for an empty prompt, or one that with one new token exceeds the context or the KV pool.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise RequestError("the prompt must have at least 1 token, got 0", param="prompt")
        if num_prompt_tokens + 1 > self.max_seq_tokens:
            is_context = self.max_seq_tokens == self.max_model_len
            limit = f"the context holds {self.max_model_len}" if is_context else f"the KV pool holds {self.max_seq_tokens}"
            remedy = "shorten it" if is_context else "shorten it or raise --num-kv-blocks"
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and at most {self.max_seq_tokens - 1} are allowed: {limit}, "
                f"one of them a new one; {remedy}",
                param="prompt",
            )

    def add(self, request: GenerationRequest) -> list[Sequence]:
        """Queue a request: `n` sequences, in the order of their index.

        Raises:
            RequestError: for a duplicate id, or what `check_fits` refuses; nothing is queued then.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; ids must be unique", param="request_id")
        self.check_fits(request)
        sequences = []
        for index in range(request.params.n):
            seq = Sequence(request, index, SeqId(self._next_seq_id), self.pools.new_tables())
            self._next_seq_id += 1
            self._sequences[seq.seq_id] = seq
            self._waiting.push(seq)
            sequences.append(seq)
        self._requests[request.request_id] = list(sequences)
        return sequences

    def abort(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> list[SequenceUpdate]:
        """End what is left of a request and free its blocks; empty for an unknown or finished one."""
        updates = []
        for seq in list(self._requests.get(request_id, ())):
            self._finish(seq)
            updates.append(SequenceUpdate(seq.seq_id, request_id, seq.index, finish_reason=reason))
        return updates

    def finish(self, seq_id: SeqId) -> bool:
        """End one sequence for a reason found outside, such as a stop string; False when it had ended already."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return False
        self._finish(seq)
        return True

    def schedule(self) -> SchedulerOutput | None:
        """Plan one step; None when there is nothing to compute."""
        output = SchedulerOutput([], 0, 0, [])
        promised = self._schedule_running(output)
        self._admit_waiting(output, promised)
        if not output.scheduled:
            return None
        output.preempted, self._preempted = self._preempted, []
        return output

    def update(self, output: SchedulerOutput, step: StepOutput) -> list[SequenceUpdate]:
        """Apply a step's results; returns what changed for each sequence that got tokens or ended.

        Rows of sequences that have finished or were preempted since are dropped.
        """
        updates = []
        for row, (scheduled, sampled) in enumerate(zip(output.scheduled, step.token_ids, strict=True)):
            seq = self._sequences.get(scheduled.seq_id)
            if seq is None or seq.generation != scheduled.generation:
                continue
            if scheduled.prompt_logprob_positions:
                seq.num_prompt_logprobs_done = scheduled.prompt_logprob_positions.stop
            if not sampled:
                continue
            update = SequenceUpdate(seq.seq_id, seq.request_id, seq.index, row=row)
            for token_id in sampled:
                update.token_ids.append(token_id)
                update.finish_reason, update.stop_reason = seq.append(token_id, self.eos_token_ids, self.max_seq_tokens)
                if update.finish_reason is not None:
                    self._finish(seq)
                    break
            logprobs = step.logprobs[row] if step.logprobs is not None else None
            update.logprobs = logprobs[: len(update.token_ids)] if logprobs is not None else None
            updates.append(update)
        return updates

    def check(self) -> None:
        """Assert the invariants that must hold between any two calls; for tests and for when the engine is idle."""
        self.pools.check(seq.blocks for seq in self._sequences.values())
        slots = self._free_slots + [seq.slot for seq in self._running if seq.slot is not None]
        assert sorted(slots) == list(range(self.config.max_num_seqs)), f"slots are lost or held twice: {slots}"
        assert self._running == sorted(self._running, key=_order), "running sequences are out of order"
        assert len(self._running) + len(self._waiting) == len(self._sequences), "a sequence is neither running nor waiting"
        assert sum(map(len, self._requests.values())) == len(self._sequences), "a sequence belongs to no request"
        for seq in self._sequences.values():
            assert seq.num_computed_tokens <= min(seq.blocks.num_positions, len(seq.token_ids)), (
                f"sequence {seq.seq_id} has computed more than it holds"
            )

    def _schedule_running(self, output: SchedulerOutput) -> list[int]:
        """Give every running sequence its tokens; returns the blocks per group still promised to unfinished prompts."""
        running = self._running
        for seq in running if self.pools.has_windows else ():
            self.pools.drop_dead(seq.blocks, seq.num_computed_tokens)
        promised = [0] * len(self.pools.pools)
        index = 0
        while index < len(running):
            seq = running[index]
            index += 1
            # One token and one row stay reserved for each sequence behind: a long prompt never starves a decode.
            num_tokens = self._chunk(seq, output, num_behind=len(running) - index)
            if num_tokens > 0:
                num_tokens = self._make_room(seq, num_tokens)
            if num_tokens > 0:
                self._schedule_tokens(seq, num_tokens, output)
            if seq.num_computed_tokens < len(seq.token_ids) and seq.slot is not None:
                self._add_promise(seq, promised)
        return promised

    def _admit_waiting(self, output: SchedulerOutput, promised: list[int]) -> None:
        """Start waiting sequences in order while slots, tokens, rows and blocks allow.

        One is admitted only when its whole known length fits into what is free now, beside what running prompts will
        still take and one block for every running sequence: each of those can ask for one within the next block_size
        tokens, and an admission that is evicted that soon has cost a prefill for nothing. With nothing running this
        asks for no more than the pool, so the head of the queue always starts. The first that does not fit stops the
        search: nobody is overtaken, and a large request is not starved by small ones behind it.
        """
        while self._free_slots and (seq := self._waiting.head()) is not None:
            num_tokens = self._chunk(seq, output, num_behind=0)
            if num_tokens == 0 or not self._is_admissible(seq, promised):
                return
            num_tokens = self.pools.fitting_end(seq.blocks, num_tokens)
            self._waiting.pop()
            seq.status = RequestStatus.RUNNING
            seq.slot = self._free_slots.pop()
            seq.is_new_in_slot = True
            insort(self._running, seq, key=_order)
            self._schedule_tokens(seq, num_tokens, output)
            self._add_promise(seq, promised)

    def _is_admissible(self, seq: Sequence, promised: list[int]) -> bool:
        if not self._running:
            return True
        needed = self.pools.needed(len(seq.token_ids))
        num_running = len(self._running)
        return all(
            need + promise + num_running <= pool.num_free for need, promise, pool in zip(needed, promised, self.pools.pools, strict=True)
        )

    def _add_promise(self, seq: Sequence, promised: list[int]) -> None:
        needed = self.pools.needed(len(seq.token_ids))
        for group, need in enumerate(needed):
            num_held = len(seq.blocks.tables[group]) - seq.blocks.num_dropped[group]
            promised[group] += max(0, need - num_held)

    def _chunk(self, seq: Sequence, output: SchedulerOutput, num_behind: int) -> int:
        """Tokens that the step's budgets leave to a sequence."""
        tokens_left = self.config.max_num_batched_tokens - output.num_tokens - num_behind
        num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, tokens_left)
        if num_tokens <= 0:
            return 0
        return seq.cut_to_rows(num_tokens, self.max_num_logit_rows - output.num_logit_rows - num_behind)

    def _make_room(self, seq: Sequence, num_tokens: int) -> int:
        """Tokens that fit, preempting from the end of the order until one does; 0 when `seq` was the last and went itself."""
        start = seq.num_computed_tokens
        if start + num_tokens <= seq.blocks.num_positions:
            return num_tokens
        while (end := self.pools.fitting_end(seq.blocks, start + num_tokens)) <= start:
            # A sequence alone always fits: it ends at max_seq_tokens, which the pools hold.
            assert len(self._running) > 1, f"sequence {seq.seq_id} is alone and cannot grow"
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return 0
        return end - start

    def _schedule_tokens(self, seq: Sequence, num_tokens: int, output: SchedulerOutput) -> None:
        start = seq.num_computed_tokens
        end = start + num_tokens
        if end > seq.blocks.num_positions:
            self.pools.extend(seq.blocks, end)
        assert seq.slot is not None
        row = ScheduledRequest(
            seq.seq_id,
            seq.request_id,
            seq.index,
            seq.generation,
            seq.slot,
            seq.token_ids[start:end],
            start,
            seq.num_prompt_tokens,
            len(seq.token_ids) - seq.num_prompt_tokens,
            [table.copy() for table in seq.blocks.tables],
            end == len(seq.token_ids),
            seq.is_new_in_slot,
            seq.prompt_logprob_positions(end),
            seq.params,
        )
        seq.is_new_in_slot = False
        seq.num_computed_tokens = end
        output.scheduled.append(row)
        output.num_tokens += num_tokens
        output.num_logit_rows += len(row.prompt_logprob_positions) + row.is_sampling

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and blocks away; what was computed is computed again, the tokens and the place in the order stay."""
        self._leave_running(seq)
        seq.status = RequestStatus.PREEMPTED
        seq.generation += 1
        seq.num_computed_tokens = 0
        self._waiting.push(seq)
        self._preempted.append(seq.seq_id)
        self.num_preemptions += 1

    def _finish(self, seq: Sequence) -> None:
        was_running = seq.slot is not None
        seq.status = RequestStatus.FINISHED
        if was_running:
            self._leave_running(seq)
        else:
            self._waiting.note_end()
        del self._sequences[seq.seq_id]
        siblings = self._requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request_id]

    def _leave_running(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.pools.release(seq.blocks)
        self._free_slots.append(seq.slot)
        seq.slot = None
        del self._running[bisect_left(self._running, seq.order, key=_order)]
