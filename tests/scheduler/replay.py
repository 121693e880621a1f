"""A scheduler before a device made of dictionaries, and every check that holds after each step.

What a sequence should be comes from `Truth`, which generates the same tokens without any scheduler.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from jaxinfer.config import PreemptionMode, SchedulerConfig
from jaxinfer.kv.block_pool import TRASH_BLOCK, BlockPool
from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.groups import KVGroupSpec
from jaxinfer.kv.prefix import Hash, PrefixIndex, sha256
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.kv.tiers import KVTiers, TierLimits
from jaxinfer.messages import ScheduledRequest, SchedulerOutput, SequenceUpdate, StepOutput
from jaxinfer.request import FinishReason, GenerationRequest
from jaxinfer.scheduler import Scheduler
from tests.scheduler.cases import EOS, FULL, Record
from tests.scheduler.dictionary_device import DictionaryDevice, Truth, begin_chain, next_link


class Harness:
    """A scheduler, its pools and tiers, the dictionary device, and every check that holds after each step."""

    def __init__(
        self,
        *,
        num_blocks: tuple[int, ...] = (64,),
        groups: tuple[KVGroupSpec, ...] = (FULL,),
        block_size: int = 4,
        max_model_len: int = 64,
        max_num_logit_rows: int = 8,
        prefix_caching: bool = True,
        key_hash: Hash = sha256,
        limits: TierLimits | None = None,
        disk: DiskIndex | None = None,
        preemption: PreemptionMode = "auto",
        read_faults: float = 0.0,
        write_faults: float = 0.0,
        seed: int = 0,
        check_period: int = 1,
        **options: Any,
    ):
        self.groups, self.block_size = groups, block_size
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | options
        self.config = SchedulerConfig(**options)
        self.max_num_logit_rows = max_num_logit_rows
        self.pools = GroupedPools(groups, num_blocks, block_size)
        index = PrefixIndex(block_size, len(groups), hash=key_hash) if prefix_caching else None
        self.tiers = KVTiers(self.pools, index, limits, disk)
        self.scheduler = Scheduler(
            self.config,
            self.pools,
            max_model_len=max_model_len,
            max_num_logit_rows=max_num_logit_rows,
            eos_token_ids=(EOS,),
            tiers=self.tiers,
            preemption=preemption,
        )
        self.is_ordered = self.config.scheduling_policy != "fair"
        self.random = random.Random(seed)
        host_slots = limits.host_slots if limits else ()
        self.device = DictionaryDevice(groups, block_size, num_blocks, host_slots, self.random, read_faults, write_faults)
        self.records: dict[int, Record] = {}
        self.living: dict[int, Record] = {}
        self.in_flight: list[tuple[SchedulerOutput, StepOutput]] = []
        self.check_period, self._num_checks = check_period, 0
        """Every how many checks the scheduler's own slow ones are made, too."""
        self.slot_ends: dict[int, tuple[int, int, int]] = {}

    # ---- what happens ----------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> list[Record]:
        added = []
        for seq in self.scheduler.add(request):
            tokens = list(request.prompt_token_ids)
            added.append(Record(request, seq, tokens, Truth(seq.index, request.cache_salt, list(tokens))))
        self.living |= {record.sequence.seq_id: record for record in added}
        self.records |= {record.sequence.seq_id: record for record in added}
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
        """One step whose results arrive at once, after all that is still under way."""
        self.land_all()
        output = self.launch()
        self.land_all()
        return output

    def launch(self) -> SchedulerOutput | None:
        """Plan a step and run it on the device; its results stay in flight."""
        before = {seq_id for seq_id, record in self.living.items() if record.sequence.slot is not None}
        output = self.scheduler.schedule()
        if output is not None:
            self._check_plan(output, before)
            for row in output.scheduled:
                self._check_row(row)
            sampled = self.device.execute(output, {row.seq_id: self.records[row.seq_id].truth for row in output.scheduled})
            for row in output.scheduled:
                self.records[row.seq_id].num_sampled += row.is_sampling
            if output.scheduled:
                self.in_flight.append((output, StepOutput(sampled)))
        self.check()
        return output

    def land(self) -> None:
        """Apply the oldest step in flight."""
        output, step = self.in_flight.pop(0)
        for row in output.scheduled:
            record = self.records[row.seq_id]
            if not record.sequence.is_finished:
                record.prompt_logprob_positions += row.prompt_logprob_positions
        self._deliver(self.scheduler.update(output, step))
        self.check()

    def acknowledge(self, ticket: int) -> None:
        """A fetch has ended."""
        result = self.device.acknowledge(ticket)
        if result.failed:
            for record in self.living.values():
                if record.sequence.fetch is not None and record.sequence.fetch.ticket == ticket:
                    record.num_overtaken = 0  # It waits anew.
        self.scheduler.fetched(result)
        self.check()

    def report_lost(self) -> None:
        """The disk says what it could not write."""
        if lost := self.device.take_lost():
            self.scheduler.forget_on_disk(lost)
        self.check()

    def land_all(self) -> None:
        """Apply whatever is under way."""
        while self.in_flight:
            self.land()
        for ticket in self.device.outstanding:
            self.acknowledge(ticket)
        if self.device.lost:
            self.report_lost()

    def drain(self, max_steps: int = 20_000) -> None:
        """Step until nothing is left, then check that every sequence ended once and as it would have alone."""
        self.land_all()
        num_idle = 0
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            output = self.step()
            num_idle = 0 if output is not None and output.scheduled else num_idle + 1
            # Each is a fetch that is under way, or one of a block that the disk turned out not to have.
            assert num_idle < 3 + len(self.living) * (2 + len(self.device.disk)), "there is work but no step"
        assert not self.scheduler.has_work, "livelock"
        self.launch()  # delivers what was cancelled last
        assert not self.device.staged, "a fetch was forgotten"
        for record in self.records.values():
            self._check_end(record)
        self._check_counters()
        assert all(pool.num_held == 0 for pool in (*self.pools.pools, *self.tiers.host))
        self.check_contents()

    def close(self) -> None:
        """Bring to disk what a later process may find there."""
        self.tiers.flush_to_disk()
        self.device.move(self.scheduler.take_moves())
        self.check()

    # ---- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What must hold between any two calls, from the tables themselves and not from the pools' own books."""
        self._num_checks += 1
        if self._num_checks % self.check_period == 0:
            self.scheduler.check()
        living = [record.sequence for record in self.living.values()]
        assert not any(seq.is_finished for seq in living), "an end was not reported"
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(living), "a sequence was lost"
        for seq in living if self.tiers.index is not None else ():
            num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
            assert seq.slot is None or seq.is_new_in_slot or len(seq.nodes) >= num_full, "a full block cannot be found"
        for group, pool in enumerate(self.pools.pools):
            _check_pool(pool, [block for seq in living for block in seq.blocks.tables[group] if block != TRASH_BLOCK])
        pinned = [(source.group, source.host_slot) for seq in living if seq.fetch for target in seq.fetch.targets
                  if seq.swapped is None and hasattr(source := target.source, "host_slot")]  # fmt: skip
        for group, pool in enumerate(self.tiers.host):
            swapped = [slot for seq in living if seq.swapped for slot in seq.swapped.slots[group]]
            _check_pool(pool, [*swapped, *(slot for other, slot in pinned if other == group)])
        if (disk := self.tiers.disk) is not None:
            assert disk.used_bytes <= disk.max_bytes and disk.used_bytes == sum(disk._sizes.values())

    def check_contents(self) -> None:
        """Whatever can be found is where it is said to be; right after a launch, when no moves are listed."""
        if self.tiers.index is None:
            return
        assert not self.tiers.moves
        places = [(self.pools.pools, self.device.memory), (self.tiers.host, self.device.host)]
        for tier, memories in places:
            for group, pool in enumerate(tier):
                for block in range(1, pool.num_blocks + 1):
                    if (node := pool.content(block)) is not None:
                        assert memories[group][block] == self._links(node), "a block has not what it is known for"

    def _links(self, node: Any) -> list[int]:
        nodes = [node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        link, links = begin_chain(nodes.pop().name[0]), []
        for token in node.prefix():
            link = next_link(link, token)
            links.append(link)
        return links[-self.block_size :]

    def _check_counters(self) -> None:
        started = [record for record in self.records.values() if record.num_cached_tokens is not None]
        counters = self.scheduler.counters
        assert counters.num_prefix_query_tokens == sum(len(record.request.prompt_token_ids) for record in started)
        num_hit_tokens = counters.num_hit_tokens_device + counters.num_hit_tokens_host + counters.num_hit_tokens_disk
        assert num_hit_tokens >= sum(record.num_cached_tokens or 0 for record in started)
        num_preemptions = counters.num_preemptions_swap + counters.num_preemptions_recompute
        assert self.scheduler.num_preemptions == num_preemptions >= sum(record.num_preemptions for record in self.records.values())

    def _check_end(self, record: Record) -> None:
        assert len(record.ends) == 1, "ended never or twice"
        expected, finish_reason, stop_reason = record.alone(self.scheduler.max_seq_tokens)
        assert record.output == expected[: len(record.output)]
        if record.updates[-1].row is not None:
            assert (record.output, record.ends[0], record.updates[-1].stop_reason) == (expected, finish_reason, stop_reason)
        if record.output and record.request.params.prompt_logprobs is not None:
            wanted = range(len(record.request.prompt_token_ids) - 1) if record.sequence.index == 0 else ()
            assert record.prompt_logprob_positions == list(wanted)

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
        assert rows or output.moves or output.fetches or output.cancelled_fetches
        assert output.num_tokens == sum(len(row.token_ids) for row in rows) <= self.config.max_num_batched_tokens
        threshold = self.config.long_prefill_token_threshold
        assert threshold is None or all(len(row.token_ids) <= threshold for row in rows)
        num_rows = sum(len(row.prompt_logprob_positions) + row.is_sampling for row in rows)
        assert output.num_logit_rows == num_rows <= self.max_num_logit_rows
        assert len({row.seq_id for row in rows}) == len({row.slot for row in rows}) == len(rows) <= self.config.max_num_seqs
        for seq_id in output.preempted:
            self.records[seq_id].num_preemptions += 1
        assert all(row.generation == self.records[row.seq_id].num_preemptions for row in rows), "a restart without a new generation"
        scheduled = {row.seq_id for row in rows}
        starved = running_before - scheduled - set(output.preempted)
        assert not any(self._may_run(self.records[seq_id]) for seq_id in starved), "a running sequence got no token"
        if self.is_ordered:
            self._check_order(output, scheduled, running_before)

    def _check_order(self, output: SchedulerOutput, scheduled: set[int], running_before: set[int]) -> None:
        living = [record.sequence for record in self.living.values()]
        running = [seq for seq in living if seq.slot is not None]
        # Admission and preemption are both by order, so at any moment no one begins before whom someone waits.
        waiting = [seq for seq in living if seq.slot is None and seq.leader is None]
        admitted = [seq.order for seq in running if seq.seq_id not in running_before]
        assert not admitted or not waiting or max(admitted) < min(seq.order for seq in waiting), "overtaken in admission"
        # One that begins again in the same step shares blocks now of which it had its own before.
        preempted = [seq.order for seq in waiting if seq.seq_id in output.preempted]
        assert not preempted or max(seq.order for seq in running) < min(preempted), "the wrong one was preempted"
        # Those of later order that run while one waits ran when it came, and none of them comes back before it; together
        # they have at most so many tokens left, one at least in each step.
        latest = max((seq.order for seq in running if seq.seq_id in scheduled), default=None)
        for seq in waiting:
            record = self.records[seq.seq_id]
            record.num_overtaken += latest is not None and latest > seq.order
            assert record.num_overtaken <= self.config.max_num_seqs * self.scheduler.max_seq_tokens, "it waits beyond its age"

    def _may_run(self, record: Record) -> bool:
        """Whether a running sequence could have computed a token."""
        seq, params, num_output = record.sequence, record.request.params, record.num_sampled
        if seq.slot is None or seq.fetch is not None:
            return False
        num_seen = len(record.output)
        is_full = params.max_tokens is not None and num_output >= params.max_tokens
        is_full |= len(record.request.prompt_token_ids) + num_output >= self.scheduler.max_seq_tokens
        return num_output == num_seen or not (is_full or params.bad_words)

    def _check_row(self, row: ScheduledRequest) -> None:
        record = self.records[row.seq_id]
        start, end = row.num_computed_tokens, row.num_computed_tokens + len(row.token_ids)
        num_prompt_tokens = len(record.request.prompt_token_ids)
        assert row.token_ids and end <= num_prompt_tokens + record.num_sampled
        assert row.is_sampling == (end == num_prompt_tokens + record.num_sampled)
        assert (row.num_prompt_tokens, row.num_output_tokens) == (num_prompt_tokens, record.num_sampled)
        assert row.is_fed_back == (end > len(record.tokens))
        owner = (row.seq_id, row.generation)
        assert row.is_first_of_slot == (self.slot_ends.get(row.slot, (None,))[:2] != owner)
        if row.is_first_of_slot:
            assert row.resumed_token_ids == (record.tokens[:start] if record.request.params.has_penalties else [])
            if record.num_cached_tokens is None:
                record.num_cached_tokens = start
            assert row.num_cached_tokens == record.num_cached_tokens, "not what was found when it began"
        else:
            assert start == self.slot_ends[row.slot][2], "tokens are not contiguous since the (re)start"
        self.slot_ends[row.slot] = (*owner, end)


def _check_pool(pool: BlockPool, held: list[int]) -> None:
    """Every block is free, cached or held, and held as often as it stands in tables."""
    holders, free, cached = Counter(held), set(pool._free), set(pool.cached())
    assert len(free) == len(pool._free), "a block is free twice"
    assert not (free & cached or free & holders.keys() or cached & holders.keys()), "a block is in two states"
    assert free | cached | holders.keys() == set(range(1, pool.num_blocks + 1)), "a block is lost or never existed"
    assert {block: count for block, count in enumerate(pool.ref_counts(), 1) if count} == holders, "references without a table"
