"""Swap, and prefixes that come back from host memory and disk."""

from __future__ import annotations

import pytest

from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.prefix_cache import PrefixCache
from jaxinfer.kv.tiers import TierLimits
from jaxinfer.messages import DiskEntry, HostSource, LoadBlock, SpillBlock, StoreBlock
from jaxinfer.request import FinishReason
from tests.scheduler.cases import FULL, Record, constant_hash, make_request, own_prompt, window_group
from tests.scheduler.replay import Harness

PROMPT = own_prompt("prompt", 64)


def tiers(host_slots: int, *, groups=(FULL,), disk_blocks: int = 0, **limits):
    size = (3, 5)[: len(groups)]
    return {
        "groups": groups,
        "limits": TierLimits(host_slots=(host_slots,) * len(groups), block_bytes=size, **limits),
        "disk": DiskIndex(disk_blocks * max(size)) if disk_blocks else None,
    }


def preempted_pair(harness: Harness) -> tuple[Record, Record]:
    """Two sequences that do not fit together to their ends, the second of which has just lost its blocks."""
    first, second = (harness.add(make_request(name, 16, ignore_eos=True, max_tokens=30))[0] for name in ("first", "second"))
    while not second.num_preemptions:
        harness.step()
    return first, second


def wait_for_row(harness: Harness, record: Record):
    """Steps until a sequence has a row; returns that."""
    for _ in range(200):
        output = harness.step()
        for row in output.scheduled if output else ():
            if row.seq_id == record.sequence.seq_id:
                return row
    raise AssertionError("it never ran")


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, window_group(9))], ids=["full", "both"])
def test_swap_resumes_without_recomputation(prefix_caching, groups):
    harness = Harness(num_blocks=(14,) * len(groups), prefix_caching=prefix_caching, preemption="swap", **tiers(20, groups=groups))
    _, second = preempted_pair(harness)
    num_computed = second.sequence.swapped.num_tokens
    assert num_computed == len(second.tokens) - 1
    row = wait_for_row(harness, second)
    assert (row.num_computed_tokens, row.token_ids) == (num_computed, second.tokens[num_computed : num_computed + 1])
    assert (row.generation, row.is_first_of_slot, row.is_sampling) == (1, True, True)
    assert second.sequence.swapped is None
    harness.drain()
    counters = harness.scheduler.counters
    assert (counters.num_preemptions_swap > 0, counters.num_preemptions_recompute, counters.num_recomputed_tokens) == (True, 0, 0)
    assert counters.num_swapped_out_bytes > 0 and harness.device.num_moves[LoadBlock] > 0


@pytest.mark.parametrize("mode", ["recompute", "no room", "too short", "no host"])
def test_what_is_not_swapped_is_computed_again(mode):
    limits = {"no host": None} | dict.fromkeys(("recompute", "too short"), 20) | {"no room": 2}
    options = tiers(limits[mode], min_swap_tokens=100 if mode == "too short" else 0) if limits[mode] else {}
    preemption = {"recompute": "recompute", "no room": "swap"}.get(mode, "auto")
    harness = Harness(num_blocks=(14,), prefix_caching=False, preemption=preemption, **options)
    _, second = preempted_pair(harness)
    assert second.sequence.swapped is None
    row = wait_for_row(harness, second)
    assert row.num_computed_tokens == 0
    harness.drain()
    assert harness.scheduler.counters.num_preemptions_swap == 0
    assert harness.scheduler.counters.num_recomputed_tokens > 0


def test_a_swapped_sequence_shares_what_the_device_still_has():
    harness = Harness(num_blocks=(14,), preemption="swap", **tiers(20))
    first, second = preempted_pair(harness)
    harness.finish(first)
    harness.launch()
    assert second.sequence.slot is not None
    # Only the growing sequence's block was taken from it, and the partly filled one is nowhere but on the host.
    assert len(second.sequence.fetch.targets) < len(second.sequence.blocks.tables[0])
    harness.drain()


def test_the_host_slots_of_a_swapped_sequence_come_free_when_the_device_had_everything():
    harness = Harness(num_blocks=(12,), block_size=1, preemption="swap", max_num_seqs=2, **tiers(20))
    # Both generate the same, so that the first has a block for every token of the second.
    _, second = (harness.add(make_request(name, PROMPT[:4], ignore_eos=True, max_tokens=8))[0] for name in ("first", "second"))
    while not second.num_preemptions:
        output = harness.step()
    assert harness.scheduler.counters.num_preemptions_swap == 1 and harness.device.num_moves[StoreBlock] > 0
    row = next(row for row in output.scheduled if row.seq_id == second.sequence.seq_id)  # It goes on at once, on shared blocks.
    assert len(row.token_ids) == 1 and not output.fetches
    assert harness.tiers.host[0].num_held == 0
    harness.drain()


@pytest.mark.parametrize("state", ["swapped", "fetching", "fetched"])
def test_a_swapped_sequence_that_ends_gives_its_host_slots_back(state):
    harness = Harness(num_blocks=(14,), prefix_caching=False, preemption="swap", **tiers(20))
    first, second = preempted_pair(harness)
    assert harness.tiers.host[0].num_held > 0
    if state != "swapped":
        harness.finish(first)
        harness.land_all()
        harness.launch()
        (ticket,) = harness.device.outstanding
        if state == "fetched":
            harness.acknowledge(ticket)
    harness.abort("second")
    assert harness.tiers.host[0].num_held == 0
    assert second.ends == [FinishReason.ABORT]
    harness.drain()


def evicted_to_host(harness: Harness, num_tokens: int = 20) -> None:
    """The prompt's blocks leave the device for the host."""
    harness.add(make_request("origin", PROMPT[:num_tokens], max_tokens=1))
    harness.drain()
    harness.add(make_request("other", own_prompt("other", harness.scheduler.max_seq_tokens - 1), max_tokens=1))
    harness.drain()
    assert PrefixCache(harness.tiers).find(harness.tiers.index.acquire_root(), []).nodes == []
    assert harness.device.num_moves[StoreBlock] >= num_tokens // 4


@pytest.mark.parametrize("options", [{}, {"key_hash": constant_hash}], ids=["sha256", "constant hash"])
def test_an_evicted_prefix_comes_back_from_the_host_while_others_run(options):
    harness = Harness(num_blocks=(14,), **tiers(30), **options)
    evicted_to_host(harness)
    running = harness.add(make_request("running", 3, ignore_eos=True, max_tokens=12))[0]
    harness.step()
    record = harness.add(make_request("again", PROMPT[:20], max_tokens=2, ignore_eos=True))[0]
    output = harness.launch()
    (fetch,) = output.fetches
    assert len(fetch.sources) == 4 and all(isinstance(source, HostSource) for source in fetch.sources)
    pinned = {source.host_slot for source in fetch.sources}
    for _ in range(3):
        assert [row.seq_id for row in harness.launch().scheduled] == [running.sequence.seq_id]
        assert all(harness.tiers.host[0].is_held(slot) for slot in pinned)
    while harness.in_flight:
        harness.land()
    harness.acknowledge(fetch.ticket)
    assert not any(harness.tiers.host[0].is_held(slot) for slot in pinned)
    row = next(row for row in harness.launch().scheduled if row.seq_id == record.sequence.seq_id)
    assert (row.num_computed_tokens, row.num_cached_tokens) == (16, 16)
    assert harness.scheduler.counters.num_hit_tokens_host == 16
    harness.drain()


def test_a_prefix_that_is_computed_faster_than_fetched_stays_on_the_host():
    harness = Harness(num_blocks=(14,), **tiers(30, min_fetch_tokens=17))
    evicted_to_host(harness)
    record = harness.add(make_request("again", PROMPT[:20], max_tokens=1))[0]
    assert wait_for_row(harness, record).num_computed_tokens == 0
    harness.drain()


@pytest.mark.parametrize("way", ["abort", "preempt"])
def test_a_fetch_is_cancelled_with_its_sequence(way):
    harness = Harness(num_blocks=(14,), **tiers(30))
    evicted_to_host(harness)
    running = harness.add(make_request("running", 20, ignore_eos=True, max_tokens=35))[0]
    harness.step()
    record = harness.add(make_request("again", PROMPT[:28], max_tokens=2, ignore_eos=True))[0]
    (fetch,) = harness.launch().fetches
    cancelled = []
    if way == "abort":
        harness.abort("again")
        assert harness.scheduler.has_cancelled_fetches
        cancelled += harness.launch().cancelled_fetches
    else:
        while not record.num_preemptions:
            cancelled += harness.launch().cancelled_fetches
            while harness.in_flight:
                harness.land()
    assert cancelled == [fetch.ticket] and not harness.scheduler.has_cancelled_fetches
    assert not harness.device.staged and harness.tiers.host[0].num_held == 0
    harness.drain()
    assert len(running.output) == 35 and len(record.output) == (0 if way == "abort" else 2)


def test_an_acknowledgement_after_the_abort_is_of_no_interest():
    harness = Harness(num_blocks=(14,), **tiers(30))
    evicted_to_host(harness)
    harness.add(make_request("again", PROMPT[:20], max_tokens=2))
    (fetch,) = harness.launch().fetches
    harness.abort("again")
    harness.acknowledge(fetch.ticket)
    harness.drain()


def evicted_to_disk(harness: Harness) -> None:
    evicted_to_host(harness)
    for number in range(3):
        harness.add(make_request(str(number), own_prompt(str(number), harness.scheduler.max_seq_tokens - 1), max_tokens=1))
        harness.drain()
    assert harness.device.num_moves[SpillBlock] > 0


def test_an_evicted_prefix_comes_back_from_disk():
    harness = Harness(num_blocks=(14,), **tiers(6, disk_blocks=60))
    evicted_to_disk(harness)
    record = harness.add(make_request("again", PROMPT[:20], max_tokens=2, ignore_eos=True))[0]
    (fetch,) = harness.launch().fetches
    assert any(isinstance(source, DiskEntry) for source in fetch.sources)
    row = wait_for_row(harness, record)
    assert (row.num_computed_tokens, row.num_cached_tokens) == (16, 16)
    assert harness.scheduler.counters.num_hit_tokens_disk > 0
    harness.drain()


@pytest.mark.parametrize("fault", ["unreadable", "other tokens", "other salt"])
def test_a_block_that_the_disk_does_not_give_back_is_computed_again(fault):
    harness = Harness(num_blocks=(14,), **tiers(6, disk_blocks=60))
    evicted_to_disk(harness)
    for name, (entry, content) in list(harness.device.disk.items()):
        if fault == "unreadable":
            del harness.device.disk[name]
        elif fault == "other tokens":
            harness.device.disk[name] = (DiskEntry(entry.key, entry.group, (*entry.token_ids[:-1], 99), entry.namespace), content)
        else:
            harness.device.disk[name] = (DiskEntry(entry.key, entry.group, entry.token_ids, b"another"), content)
    record = harness.add(make_request("again", PROMPT[:20], max_tokens=2, ignore_eos=True))[0]
    (fetch,) = harness.launch().fetches
    harness.acknowledge(fetch.ticket)
    assert record.sequence.slot is None and record.sequence.fetch is None
    row = wait_for_row(harness, record)
    assert row.num_cached_tokens == row.num_computed_tokens < 16
    assert harness.scheduler.counters.num_disk_faults > 0
    harness.drain()


def test_after_a_write_has_failed_nothing_more_goes_to_disk():
    harness = Harness(num_blocks=(14,), write_faults=1.0, **tiers(6, disk_blocks=60))
    evicted_to_disk(harness)
    num_spilled = harness.device.num_moves[SpillBlock]
    evicted = harness.add(make_request("again", own_prompt("again", 50), max_tokens=2))[0]
    harness.drain()
    assert evicted.ends and harness.device.num_moves[SpillBlock] == num_spilled
    assert len(harness.tiers.disk) == 0


def test_the_picture_tells_states_and_holders_of_blocks():
    harness = Harness(num_blocks=(14,), preemption="swap", max_num_seqs=2, **tiers(30))
    first, second = preempted_pair(harness)
    harness.add(make_request("third", 3))
    picture = harness.scheduler.kv_map()
    assert [(one.request_id, one.state) for one in picture.sequences] == [("first", "running"), ("second", "swapped"), ("third", "waiting")]
    assert picture.sequences[0].block_ids == tuple(first.sequence.blocks.tables[0])
    (group,) = picture.groups
    held = {block_id for block_id, count in enumerate(group.holders, 1) if count}
    assert held == set(first.sequence.blocks.tables[0])
    assert sum(group.is_cached) >= len(first.tokens) // 4 - 1
    assert (picture.host_slots_total, picture.host_slots_held) == (30, len(second.sequence.swapped.slots[0]))
    harness.finish(first)
    harness.launch()
    assert harness.scheduler.kv_map().sequences[0].state == "fetching"
    harness.drain()
