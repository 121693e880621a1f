"""A device made of dictionaries: it writes and reads KV through the block tables it is given and checks what it reads.

It knows nothing of the scheduler's state. What a sequence should be comes from `alone`, which generates the same tokens
without any scheduler.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from jaxinfer.config import SchedulerConfig
from jaxinfer.kv.block_pool import TRASH_BLOCK, GroupedPools
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.request import FinishReason, GenerationRequest, SamplingParams
from jaxinfer.scheduler import ScheduledRequest, Scheduler, SchedulerOutput, SequenceUpdate, StepOutput
from jaxinfer.sequence import Sequence

EOS, STOP, VOCAB_SIZE = 1, 2, 24
TENSORS = (KVTensorSpec(name="key", num_heads=1, head_dim=8, dtype="float32"),)
FULL = KVGroupSpec(kind="full", layers=(0, 2), tensors=TENSORS)


def window_group(window: int) -> KVGroupSpec:
    return KVGroupSpec(kind="window", window=window, layers=(1,), tensors=TENSORS)


def make_request(request_id: str, num_prompt_tokens: int, *, priority: int = 0, **params) -> GenerationRequest:
    """A request whose prompt differs from every other id's."""
    digest = hashlib.sha256(request_id.encode()).digest()
    prompt = tuple(digest[i % 32] + 3 for i in range(num_prompt_tokens))
    return GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(**params), priority=priority)


def next_token(tokens: list[int], index: int) -> int:
    """The model: a token that depends on every token before it."""
    return hashlib.sha256(repr((tokens, index)).encode()).digest()[0] % VOCAB_SIZE


def alone(request: GenerationRequest, index: int, max_seq_tokens: int) -> tuple[list[int], FinishReason, int | None]:
    """Output tokens, finish reason and stop reason of a sequence that nobody disturbs."""
    params, tokens, output = request.params, list(request.prompt_token_ids), []
    while True:
        token = next_token(tokens, index)
        tokens.append(token)
        output.append(token)
        may_stop = len(output) > params.min_tokens
        if may_stop and token == EOS and not params.ignore_eos:
            return output, FinishReason.STOP, None
        if may_stop and token in params.stop_token_ids:
            return output, FinishReason.STOP, token
        if len(tokens) == max_seq_tokens or len(output) == params.max_tokens:
            return output, FinishReason.LENGTH, None


@dataclass
class Record:
    """One sequence as its user sees it."""

    request: GenerationRequest
    sequence: Sequence
    tokens: list[int]
    num_fed: int = 0
    updates: list[SequenceUpdate] = field(default_factory=list)
    prompt_logprob_positions: list[int] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def ends(self) -> list[FinishReason]:
        return [update.finish_reason for update in self.updates if update.finish_reason is not None]

    @property
    def output(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]


class Harness:
    """A scheduler, its pools, the dictionary device, and every check that holds after each step."""

    def __init__(
        self,
        *,
        num_blocks: tuple[int, ...] = (64,),
        groups: tuple[KVGroupSpec, ...] = (FULL,),
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 64,
        max_num_logit_rows: int = 8,
    ):
        self.groups, self.block_size = groups, block_size
        self.config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.max_num_logit_rows = max_num_logit_rows
        self.pools = GroupedPools(groups, num_blocks, block_size)
        self.scheduler = Scheduler(
            self.config, self.pools, max_model_len=max_model_len, max_num_logit_rows=max_num_logit_rows, eos_token_ids=(EOS,)
        )
        self.records: dict[int, Record] = {}
        self.living: dict[int, Record] = {}
        self.in_flight: list[tuple[SchedulerOutput, StepOutput]] = []
        self.memory: list[dict[int, tuple[int, int]]] = [{} for _ in groups]
        self.slot_ends: dict[int, tuple[int, int, int]] = {}

    def add(self, request: GenerationRequest) -> list[Record]:
        added = [Record(request, seq, list(request.prompt_token_ids)) for seq in self.scheduler.add(request)]
        self.living |= {record.sequence.seq_id: record for record in added}
        self.records |= self.living
        self.check()
        return added

    def abort(self, request_id: str) -> None:
        self._deliver(self.scheduler.abort(request_id))
        self.check()

    def finish(self, record: Record) -> None:
        """End a sequence from outside, as a stop string does."""
        if self.scheduler.finish(record.sequence.seq_id):
            end = SequenceUpdate(record.sequence.seq_id, record.request.request_id, record.sequence.index, finish_reason=FinishReason.STOP)
            self._deliver([end])
        self.check()

    def step(self) -> SchedulerOutput | None:
        """One step whose results arrive at once, after those of any step in flight."""
        while self.in_flight:
            self.land()
        output = self.launch()
        if output is not None:
            self.land()
        return output

    def launch(self) -> SchedulerOutput | None:
        """Plan a step and run it on the device; its results stay in flight."""
        before = {seq_id for seq_id, record in self.living.items() if record.sequence.slot is not None}
        output = self.scheduler.schedule()
        if output is not None:
            self._check_plan(output, before)
            self.in_flight.append((output, self._execute(output)))
        self.check()
        return output

    def land(self) -> None:
        """Apply the oldest step in flight."""
        output, step = self.in_flight.pop(0)
        for row in output.scheduled:
            record = self.records[row.seq_id]
            if not record.sequence.is_finished and record.sequence.generation == row.generation:
                record.prompt_logprob_positions += row.prompt_logprob_positions
        self._deliver(self.scheduler.update(output, step))
        self.check()

    def drain(self, max_steps: int = 20_000) -> None:
        """Step until nothing is left, then check that every sequence ended once and as it would have alone."""
        while self.in_flight:
            self.land()
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            assert self.step() is not None, "there is work but no step"
        assert not self.scheduler.has_work, "livelock"
        for record in self.records.values():
            assert len(record.ends) == 1, "ended never or twice"
            expected, finish_reason, stop_reason = alone(record.request, record.sequence.index, self.scheduler.max_seq_tokens)
            assert record.output == expected[: len(record.output)]
            if record.updates[-1].row is not None:
                assert (record.output, record.ends[0], record.updates[-1].stop_reason) == (expected, finish_reason, stop_reason)
            if record.output and record.request.params.prompt_logprobs is not None:
                wanted = range(len(record.request.prompt_token_ids) - 1) if record.sequence.index == 0 else ()
                assert record.prompt_logprob_positions == list(wanted)

    def check(self) -> None:
        """What must hold between any two calls, from the tables themselves and not from the pool's own books."""
        self.scheduler.check()
        living = [record.sequence for record in self.living.values()]
        assert not any(seq.is_finished for seq in living), "an end was not reported"
        for group, pool in enumerate(self.pools.pools):
            held = [block for seq in living for block in seq.blocks.tables[group] if block != TRASH_BLOCK]
            assert len(held) == len(set(held)), "a block is held twice"
            assert len(held) + pool.num_free == pool.num_blocks, "a block is lost"
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(living)

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            record = self.records[update.seq_id]
            assert not record.ends, "an update after the end"
            record.updates.append(update)
            record.tokens += update.token_ids
            assert record.tokens == record.sequence.token_ids
            if update.finish_reason is not None:
                assert record.sequence.is_finished and record.sequence.slot is None and not any(record.sequence.blocks.tables)
                del self.living[update.seq_id]

    def _check_plan(self, output: SchedulerOutput, running_before: set[int]) -> None:
        rows = output.scheduled
        assert rows and output.num_tokens == sum(len(row.token_ids) for row in rows) <= self.config.max_num_batched_tokens
        num_rows = sum(len(row.prompt_logprob_positions) + row.is_sampling for row in rows)
        assert output.num_logit_rows == num_rows <= self.max_num_logit_rows
        assert len({row.seq_id for row in rows}) == len({row.slot for row in rows}) == len(rows) <= self.config.max_num_seqs
        for seq_id in output.preempted:
            self.records[seq_id].num_preemptions += 1
            assert self.records[seq_id].sequence.slot is None
        assert all(row.generation == self.records[row.seq_id].num_preemptions for row in rows), "a restart without a new generation"
        living = [record.sequence for record in self.living.values()]
        running = [seq.order for seq in living if seq.slot is not None]
        # Admission and preemption are both by order, so at any moment no one runs before whom someone waits.
        waiting = [seq.order for seq in living if seq.slot is None]
        admitted = [self.records[row.seq_id].sequence.order for row in rows if row.seq_id not in running_before]
        assert not admitted or not waiting or max(admitted) < min(waiting), "overtaken in admission"
        preempted = [self.living[seq_id].sequence.order for seq_id in output.preempted if seq_id in self.living]
        assert not preempted or max(running) < min(preempted), "the wrong one was preempted"
        sampling = {row.seq_id for flying, _ in self.in_flight for row in flying.scheduled if row.is_sampling}
        starved = running_before - {row.seq_id for row in rows} - set(output.preempted) - sampling
        assert not any(self.records[seq_id].sequence.slot is not None for seq_id in starved), "a running sequence got no token"

    def _execute(self, output: SchedulerOutput) -> StepOutput:
        for row in output.scheduled:
            self._write(row)
        # Reads come after all writes of the step: the order least kind to a block given away too early.
        sampled = [self._read(row) for row in output.scheduled]
        return StepOutput([[token] if row.is_sampling else [] for token, row in zip(sampled, output.scheduled, strict=True)])

    def _write(self, row: ScheduledRequest) -> None:
        start, end = row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids)
        record = self.records[row.seq_id]
        assert row.token_ids == record.tokens[start:end], "not the sequence's own tokens"
        assert row.is_sampling == (end == len(record.tokens))
        assert (row.num_prompt_tokens, row.num_output_tokens) == (len(record.request.prompt_token_ids), len(record.output))
        owner = (row.seq_id, row.generation)
        assert row.is_first_of_slot == (self.slot_ends.get(row.slot, (None,))[:2] != owner)
        assert start == (0 if row.is_first_of_slot else self.slot_ends[row.slot][2]), "tokens are not contiguous since the (re)start"
        self.slot_ends[row.slot] = (*owner, end)
        for memory, table in zip(self.memory, row.block_ids, strict=True):
            assert len(table) == -(-end // self.block_size), "the table is not as long as the tokens"
            for position, token in enumerate(row.token_ids, start):
                block = table[position // self.block_size]
                assert block != TRASH_BLOCK
                memory[block * self.block_size + position % self.block_size] = (row.seq_id, position, token)

    def _read(self, row: ScheduledRequest) -> int:
        """Attend: every key in the window of every token of the row must be the sequence's own, in every group."""
        start, end = row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids)
        for group, memory, table in zip(self.groups, self.memory, row.block_ids, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            keys = [memory[table[p // self.block_size] * self.block_size + p % self.block_size] for p in range(first, end)]
            tokens = self.records[row.seq_id].tokens
            assert keys == [(row.seq_id, position, tokens[position]) for position in range(first, end)], "foreign or stale KV"
        return next_token(self.records[row.seq_id].tokens[:end], row.index)
