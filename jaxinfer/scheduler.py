"""Which tokens of which sequences the next step computes, and what its results mean. No jax.

There are no phases. A sequence has a number of computed tokens that chases its number of tokens; chunked prefill, cached
prefixes, decode, and what follows a preemption are this one rule.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from operator import attrgetter

from jaxinfer.config import PreemptionMode, SchedulerConfig
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.kv.kv_map import KVMap, draw_map
from jaxinfer.kv.prefix_cache import PrefixCache
from jaxinfer.kv.swap import release_swapped, swap_out
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.kv.tiers import FetchTarget, KVCounters, KVTiers, PendingFetch
from jaxinfer.messages import (
    NO_POSITIONS,
    BlockMove,
    DiskEntry,
    Fetch,
    FetchResult,
    ScheduledRequest,
    SchedulerOutput,
    SeqId,
    SequenceUpdate,
    StepOutput,
)
from jaxinfer.request import FinishReason, GenerationRequest, RequestId, RequestStatus
from jaxinfer.sequence import Sequence
from jaxinfer.starting_points import Start, StartingPoints
from jaxinfer.waiting_queue import make_queue

_order = attrgetter("order")
_UNKNOWN = [0]
"""The tokens of a row whose only one is still being sampled; shared, nobody changes it."""


class Scheduler:
    """Continuous batching over KV memory, by a policy: who waits in which order is `waiting_queue`'s.

    `schedule()` and `update()` alternate, or `schedule()` runs ahead: a sequence whose last token is still being sampled is
    planned on with a token that only the device knows. Steps come back by `update` in the order in which they were planned.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: GroupedPools,
        *,
        max_model_len: int,
        max_num_logit_rows: int,
        eos_token_ids: Collection[int] = (),
        tiers: KVTiers | None = None,
        preemption: PreemptionMode = "auto",
    ):
        if max_num_logit_rows < config.max_num_seqs:
            raise ConfigError(
                f"a step must have a row of logits for each of --max-num-seqs ({config.max_num_seqs}) sequences, got {max_num_logit_rows}",
                option="--max-num-seqs",
            )
        self.config = config
        self.pools = pools
        self.tiers = tiers or KVTiers(pools)
        self.preemption = preemption
        self._prefixes = PrefixCache(self.tiers) if self.tiers.index is not None else None
        self._starting_points = StartingPoints(self.tiers, self._prefixes)
        self.max_num_logit_rows = max_num_logit_rows
        self.max_seq_tokens = min(max_model_len, pools.max_seq_tokens or max_model_len)
        """Most tokens of one sequence, prompt and output: what the context and the pools with nobody else in them hold.

        Sequences end there by this number and not by what others hold, so company changes when, never what.
        """
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.num_preemptions = 0
        self._next_seq_id = 0
        self._next_ticket = 0
        self._waiting = make_queue(config.scheduling_policy)
        self._is_fair = config.scheduling_policy == "fair"
        self._num_followers = 0
        self._leaders_done: list[Sequence] = []
        self._running: list[Sequence] = []
        self._sequences: dict[SeqId, Sequence] = {}
        self._requests: dict[RequestId, list[Sequence]] = {}
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._preempted: list[SeqId] = []
        self._fetching: dict[int, Sequence] = {}
        self._cancelled: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._sequences)

    @property
    def has_cancelled_fetches(self) -> bool:
        """Whether the next `schedule` tells of fetches that nobody waits for any more, though there may be nothing to compute."""
        return bool(self._cancelled)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not, preempted ones included."""
        return len(self._waiting) + self._num_followers

    @property
    def num_kv_tokens(self) -> int:
        """Computed tokens of running sequences; against held blocks x block size this tells the waste."""
        return sum(seq.num_computed_tokens for seq in self._running)

    @property
    def counters(self) -> KVCounters:
        """What happened in KV memory so far."""
        return self.tiers.counters

    def kv_map(self) -> KVMap:
        """A picture of who holds which blocks now."""
        return draw_map(self.tiers, (seq.picture() for seq in self._sequences.values()))

    def check_fits(self, request: GenerationRequest) -> None:
        """Refuse what can never run.

        Raises:
            RequestError: for an empty prompt, or one that with one new token exceeds the context or the KV pool.
        """
        if request.priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"priority must be 0 with --scheduling-policy {self.config.scheduling_policy}, got {request.priority}", param="priority"
            )
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
            root = self.tiers.index.acquire_root(request.cache_salt) if self.tiers.index is not None else None
            seq = Sequence(request, index, SeqId(self._next_seq_id), self.pools.new_tables(), max_seq_tokens=self.max_seq_tokens, root=root)
            self._next_seq_id += 1
            self._sequences[seq.seq_id] = seq
            self._waiting.arrive(seq.user)
            sequences.append(seq)
        # The first computes the prompt, the others wait for it and then share its blocks.
        first, followers = sequences[0], sequences[1:]
        first.followers = followers
        for seq in followers:
            seq.leader = first
        self._num_followers += len(followers)
        self._waiting.push(first)
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
        """Plan one step; None when there is nothing to do now."""
        self.tiers.begin_step()
        self._release_followers()
        output = SchedulerOutput([], 0, 0, [])
        promised = self._schedule_running(output)
        self._admit_waiting(output, promised)
        output.moves = self.tiers.take_moves()
        if not (output.scheduled or output.moves or output.fetches or self._cancelled):
            return None
        output.preempted, self._preempted = self._preempted, []
        output.cancelled_fetches, self._cancelled = self._cancelled, []
        return output

    def update(self, output: SchedulerOutput, step: StepOutput) -> list[SequenceUpdate]:
        """Apply a step's results; returns what changed for each sequence that got tokens or ended.

        Rows of sequences that have ended since are dropped. Those of preempted ones count: what was computed was right, and
        nobody computes it again before it has come back.
        """
        updates, eos_token_ids, sequences, logprobs = [], self.eos_token_ids, self._sequences, None
        for row, (scheduled, sampled) in enumerate(zip(output.scheduled, step.token_ids, strict=True)):
            seq = sequences.get(scheduled.seq_id)
            if seq is None:
                continue
            seq.num_in_flight -= 1
            if scheduled.prompt_logprob_positions:
                seq.num_prompt_logprobs_done = scheduled.prompt_logprob_positions.stop
            if not scheduled.is_sampling:
                continue
            seq.num_pending -= 1
            finish_reason = stop_reason = None
            for count, token_id in enumerate(sampled, 1):
                finish_reason, stop_reason = seq.append(token_id, eos_token_ids)
                if finish_reason is not None:
                    sampled = sampled[:count]
                    break
            if seq.num_computed_tokens >= seq.next_publish:
                self._publish(seq)
            if finish_reason is not None:
                self._finish(seq)
            if step.logprobs is not None:
                logprobs = step.logprobs[row]
                logprobs = logprobs and logprobs[: len(sampled)]
            updates.append(SequenceUpdate(seq.seq_id, seq.request_id, seq.index, sampled, logprobs, finish_reason, stop_reason, row))
        return updates

    def fetched(self, result: FetchResult) -> None:
        """A fetch has ended: its sequence goes on, or, where the disk failed, starts again without what it hoped for."""
        seq = self._fetching.pop(result.ticket, None)
        if result.failed:
            self.tiers.forget_on_disk(result.failed)
        if seq is None or seq.fetch is None:
            return  # It was aborted or preempted meanwhile.
        fetch, seq.fetch = seq.fetch, None
        if result.failed:
            self.tiers.unpin(fetch.pinned)
            self._leave_running(seq)
            seq.status = RequestStatus.WAITING
            seq.num_computed_tokens = 0
            self._waiting.push(seq)
            return
        self.tiers.load(fetch, is_swap=seq.swapped is not None)
        self.tiers.unpin(fetch.pinned)
        self._release_swapped(seq)

    def forget_on_disk(self, entries: Iterable[DiskEntry], *, takes_more: bool = False) -> None:
        """The disk could not write these; unless it `takes_more`, nothing more is sent there."""
        self.tiers.forget_on_disk(entries, is_write=not takes_more)

    def take_moves(self) -> list[BlockMove]:
        """Moves caused by somebody who took blocks from the pools directly."""
        return self.tiers.take_moves()

    def check(self) -> None:
        """Assert the invariants that must hold between any two calls; for tests and for when the engine is idle."""
        sequences = self._sequences.values()
        self.pools.check(seq.blocks for seq in sequences)
        self.tiers.check([seq.swapped for seq in sequences if seq.swapped], [seq.fetch for seq in sequences if seq.fetch])
        slots = self._free_slots + [seq.slot for seq in self._running if seq.slot is not None]
        assert sorted(slots) == list(range(self.config.max_num_seqs)), f"slots are lost or held twice: {slots}"
        assert self._running == sorted(self._running, key=_order), "running sequences are out of order"
        assert len(self._running) + self.num_waiting == len(self._sequences), "a sequence is neither running nor waiting"
        assert sum(map(len, self._requests.values())) == len(self._sequences), "a sequence belongs to no request"
        assert {id(seq) for seq in self._fetching.values()} >= {id(seq) for seq in sequences if seq.fetch}, "a fetch without a ticket"
        for seq in sequences:
            assert seq.num_computed_tokens <= min(seq.blocks.num_positions, seq.num_tokens), (
                f"sequence {seq.seq_id} has computed more than it holds"
            )
            assert seq.slot is not None or not any(seq.blocks.tables), f"sequence {seq.seq_id} waits and holds blocks"

    # ---- planning --------------------------------------------------------------------------------------------------

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
            if self._schedule_decode(seq, output):
                continue
            if seq.fetch is None and seq.may_advance():
                # One token and one row stay reserved for each sequence behind: a long prompt never starves a decode.
                num_tokens = self._chunk(seq, output, num_behind=len(running) - index)
                if num_tokens > 0:
                    num_tokens = self._make_room(seq, num_tokens)
                if num_tokens > 0:
                    self._schedule_tokens(seq, num_tokens, output)
            if seq.num_computed_tokens < len(seq.token_ids) and seq.slot is not None:
                self._add_promise(seq, promised)
        return promised

    def _schedule_decode(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """`_schedule_tokens` for what most rows are, and therefore short: one output token, and a block for it.

        False, and nothing done, for everything else. Every budget has room for it: `_chunk` leaves a token and a row to each.
        """
        start, num_pending = seq.num_computed_tokens, seq.num_pending
        if start >= seq.plain_until or len(seq.token_ids) + num_pending != start + 1:
            return False
        if start >= seq.blocks.num_positions and not self.pools.grow(seq.blocks):
            return False
        assert seq.slot is not None
        num_prompt_tokens = seq.num_prompt_tokens
        output.scheduled.append(
            ScheduledRequest(
                seq.seq_id,
                seq.request_id,
                seq.index,
                seq.generation,
                seq.slot,
                _UNKNOWN if num_pending else seq.token_ids[start:],
                start,
                num_prompt_tokens,
                start + 1 - num_prompt_tokens,
                seq.blocks.tables,
                True,
                False,
                NO_POSITIONS,
                seq.params,
                num_pending > 0,
            )
        )
        output.num_tokens += 1
        output.num_logit_rows += 1
        seq.num_launched_tokens = start
        seq.num_computed_tokens = start + 1
        seq.num_in_flight += 1
        seq.num_pending = num_pending + 1
        if self._is_fair:
            self._waiting.charge(seq.user, 1)
        if not num_pending and start + 1 >= seq.next_publish:
            self._publish(seq)
        return True

    def _admit_waiting(self, output: SchedulerOutput, promised: list[int]) -> None:
        """Start waiting sequences in order while slots, tokens, rows and blocks allow.

        One is admitted only when its whole known length fits into what is available now, beside what running prompts will
        still take and one block for every running sequence: each of those can ask for one within the next block_size
        tokens, and an admission that is evicted that soon has cost a prefill for nothing. With nothing running this
        asks for no more than the pool, so the head of the queue always starts. The first that does not fit stops the
        search: nobody is overtaken, and a large request is not starved by small ones behind it.
        """
        while self._free_slots and output.num_tokens < self.config.max_num_batched_tokens:
            seq = self._waiting.head()
            # What it has in flight comes back first, so that nothing is computed or sampled twice.
            if seq is None or seq.num_in_flight or not self._admit(seq, output, promised):
                return

    def _admit(self, seq: Sequence, output: SchedulerOutput, promised: list[int]) -> bool:
        start = self._starting_points.best(seq, self._relatives(seq))
        if not self._is_admissible(seq, start, promised):
            return False
        seq.num_computed_tokens = start.num_tokens
        num_tokens = self._chunk(seq, output, num_behind=0)
        if num_tokens == 0 or not self._may_prefill(seq, num_tokens):
            seq.num_computed_tokens = 0
            return False
        self._waiting.pop()
        seq.status = RequestStatus.RUNNING
        seq.slot = self._free_slots.pop()
        seq.is_new_in_slot = True
        insort(self._running, seq, key=_order)
        targets = self._starting_points.take(seq, start)
        if targets:
            self._fetch(seq, targets, output)
        else:
            self._release_swapped(seq)  # The device had all of it still.
            self._schedule_tokens(seq, self.pools.fitting_end(seq.blocks, start.num_tokens + num_tokens) - start.num_tokens, output)
        self._add_promise(seq, promised)
        return True

    def _relatives(self, seq: Sequence) -> Collection[Sequence]:
        """The sequences whose blocks it may share before they are cached: its request's, or the one it was forked from."""
        if seq.fork_of is not None:
            return [one for one in self._requests.get(seq.fork_of, ()) if one.index == seq.fork_index]
        siblings = self._requests[seq.request_id]
        return siblings if len(siblings) > 1 else ()

    def _fetch(self, seq: Sequence, targets: list[FetchTarget], output: SchedulerOutput) -> None:
        ticket = self._next_ticket
        self._next_ticket += 1
        pinned = self.tiers.pin(targets) if seq.swapped is None else []  # A swapped sequence holds its slots anyway.
        seq.fetch = PendingFetch(ticket, targets, pinned)
        self._fetching[ticket] = seq
        output.fetches.append(Fetch(ticket, tuple(target.source for target in targets)))

    def _is_admissible(self, seq: Sequence, start: Start, promised: list[int]) -> bool:
        if not self._running:
            return True
        num_running = len(self._running)
        needed = self.pools.needed(len(seq.token_ids))
        return all(
            max(0, need - reused) + claimed + promise + num_running <= pool.num_available
            for need, reused, claimed, promise, pool in zip(needed, start.reused, start.claimed, promised, self.pools.pools, strict=True)
        )

    def _may_prefill(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether another prompt may be computed in parts; one that is computed whole always may."""
        most = self.config.max_num_partial_prefills
        if most is None or seq.num_computed_tokens + num_tokens >= seq.num_prompt_tokens:
            return True
        return sum(other.num_computed_tokens < other.num_prompt_tokens for other in self._running) < most

    def _add_promise(self, seq: Sequence, promised: list[int]) -> None:
        needed = self.pools.needed(len(seq.token_ids))
        for group, need in enumerate(needed):
            num_held = len(seq.blocks.tables[group]) - seq.blocks.num_dropped[group]
            promised[group] += max(0, need - num_held)

    def _chunk(self, seq: Sequence, output: SchedulerOutput, num_behind: int) -> int:
        """Tokens that the step's budgets leave to a sequence."""
        num_tokens = min(seq.num_tokens - seq.num_computed_tokens, self.config.max_num_batched_tokens - output.num_tokens - num_behind)
        if num_tokens > 1 and self.config.long_prefill_token_threshold is not None:
            num_tokens = min(num_tokens, self.config.long_prefill_token_threshold)
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
        token_ids = seq.token_ids[start:end]
        is_fed_back = len(token_ids) < num_tokens
        if is_fed_back:
            token_ids.append(0)
        is_sampling = end == seq.num_tokens
        row = ScheduledRequest(
            seq.seq_id,
            seq.request_id,
            seq.index,
            seq.generation,
            seq.slot,
            token_ids,
            start,
            seq.num_prompt_tokens,
            seq.num_tokens - seq.num_prompt_tokens,
            seq.blocks.tables,
            is_sampling,
            seq.is_new_in_slot,
            seq.prompt_logprob_positions(end),
            seq.params,
            is_fed_back,
        )
        if seq.is_new_in_slot:
            if not seq.has_started:
                seq.has_started = True
                seq.num_cached_tokens = start
                self.counters.num_prefix_query_tokens += seq.num_prompt_tokens
            row.num_cached_tokens = seq.num_cached_tokens
            row.resumed_token_ids = seq.token_ids[:start] if seq.params.has_penalties else []
            seq.is_new_in_slot = False
        # What it found may be computed by this very step.
        seq.num_launched_tokens = 0 if row.is_first_of_slot else start
        seq.num_computed_tokens = end
        if end >= seq.num_prompt_tokens and not seq.waits_for_tokens:
            seq.plain_until = seq.max_num_tokens - 1
        seq.num_in_flight += 1
        seq.num_pending += is_sampling
        output.scheduled.append(row)
        output.num_tokens += num_tokens
        output.num_logit_rows += len(row.prompt_logprob_positions) + is_sampling
        if self._is_fair:
            self._waiting.charge(seq.user, num_tokens)
        self._publish(seq)
        if seq.followers and end >= seq.num_prompt_tokens - 1:
            self._leaders_done.append(seq)

    def _publish(self, seq: Sequence) -> None:
        """Make its full blocks findable. Steps run in order, so those of a step that is only planned count already."""
        size = self.pools.block_size
        if seq.root is None or self.tiers.index is None or self._prefixes is None:
            return
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // size
        if num_full > len(seq.nodes):
            self.tiers.index.extend_keys(seq.block_keys, seq.root, seq.token_ids, num_full)
            self._prefixes.publish(seq.nodes, seq.root, seq.block_keys, num_full, seq.blocks)
        seq.next_publish = (len(seq.nodes) + 1) * size

    # ---- leaving ---------------------------------------------------------------------------------------------------

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and blocks away. What was computed goes to host memory or is computed again; tokens and place stay."""
        num_computed = seq.num_computed_tokens
        if seq.fetch is not None:
            self._cancel_fetch(seq)
            num_computed = 0  # Nothing yet: what it waited for stays where it is.
        elif self._prefers_swap(num_computed):
            seq.swapped = swap_out(self.tiers, seq.blocks, seq.nodes, num_computed)
        if seq.swapped is not None:
            self.counters.num_preemptions_swap += 1
        else:
            self.counters.num_preemptions_recompute += 1
            self.counters.num_recomputed_tokens += num_computed
        self._leave_running(seq)
        seq.status = RequestStatus.PREEMPTED
        seq.generation += 1
        seq.num_computed_tokens = 0
        self._waiting.push(seq)
        self._preempted.append(seq.seq_id)
        self.num_preemptions += 1
        self._leaders_done.append(seq)

    def _prefers_swap(self, num_tokens: int) -> bool:
        least = self.tiers.limits.min_swap_tokens
        return self.preemption == "swap" or (self.preemption == "auto" and least is not None and num_tokens >= least)

    def _finish(self, seq: Sequence) -> None:
        was_running = seq.slot is not None
        seq.status = RequestStatus.FINISHED
        if seq.fetch is not None:
            self._cancel_fetch(seq)
        self._release_swapped(seq)
        if was_running:
            self._leave_running(seq)
        elif seq.leader is not None:
            self._num_followers -= 1
        else:
            self._waiting.note_end(seq)
        self._waiting.leave(seq.user)
        self._leaders_done.append(seq)
        if seq.root is not None and self.tiers.index is not None:
            self.tiers.index.release_root(seq.root)
        del self._sequences[seq.seq_id]
        siblings = self._requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request_id]

    def _release_followers(self) -> None:
        """Queue the other answers of requests whose first one has computed the prompt, or never will."""
        for leader in self._leaders_done:
            for seq in leader.followers:
                if not seq.is_finished:
                    seq.leader = None
                    self._num_followers -= 1
                    self._waiting.push(seq)
            leader.followers = []
        self._leaders_done.clear()

    def _cancel_fetch(self, seq: Sequence) -> None:
        assert seq.fetch is not None
        self.tiers.unpin(seq.fetch.pinned)
        del self._fetching[seq.fetch.ticket]
        self._cancelled.append(seq.fetch.ticket)
        seq.fetch = None

    def _release_swapped(self, seq: Sequence) -> None:
        if seq.swapped is not None:
            release_swapped(self.tiers, seq.swapped)
            seq.swapped = None

    def _leave_running(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.pools.release(seq.blocks)
        self._free_slots.append(seq.slot)
        seq.slot = None
        seq.plain_until = 0
        del self._running[bisect_left(self._running, seq.order, key=_order)]
