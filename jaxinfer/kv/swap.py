"""Preempted sequences in host memory: out, so that nothing is computed twice, and in again. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.kv.groups import ceil_div
from jaxinfer.kv.prefix import PrefixNode
from jaxinfer.kv.tables import BlockTables
from jaxinfer.kv.tiers import FetchTarget, KVTiers, SwappedBlocks
from jaxinfer.messages import HostSource


def swap_out(tiers: KVTiers, blocks: BlockTables, nodes: Sequence[PrefixNode], num_tokens: int) -> SwappedBlocks | None:
    """Copy a sequence's blocks to host slots that it holds from then on; None, and nothing done, where they are too few."""
    if not tiers.host:
        return None
    num_blocks = ceil_div(num_tokens, tiers.pools.block_size)
    first = list(blocks.num_dropped)
    shared = [[_host_slot(nodes, group, position) for position in range(first[group], num_blocks)] for group in tiers.group_ids]
    for group, slots in enumerate(shared):
        tiers.host[group].share(slot for slot in slots if slot)
    if any(slots.count(0) > pool.num_available for slots, pool in zip(shared, tiers.host, strict=True)):
        for group, slots in enumerate(shared):
            tiers.host[group].release([slot for slot in slots if slot])
        return None
    for group, slots in enumerate(shared):
        for offset, slot in enumerate(slots):
            if not slot:
                slots[offset] = tiers.store(group, blocks.tables[group][first[group] + offset])
                tiers.counters.num_swapped_out_bytes += tiers.block_bytes(group)
                position = first[group] + offset
                if position < len(nodes) and nodes[position].is_indexed and not nodes[position].host_slots[group]:
                    nodes[position].host_slots[group] = slots[offset]
                    tiers.host[group].keep(slots[offset], nodes[position])
    return SwappedBlocks(first, shared, num_tokens)


def still_on_device(tiers: KVTiers, swapped: SwappedBlocks, nodes: Sequence[PrefixNode]) -> tuple[list[int], list[int]]:
    """Blocks per group of a swapped sequence that the device still has, and those among them that nobody holds."""
    reused, claimed = [], []
    for group, pool in enumerate(tiers.pools.pools):
        first, count = swapped.first[group], len(swapped.slots[group])
        there = [node.block_ids[group] for node in nodes[first : first + count] if node.block_ids[group]]
        reused.append(len(there))
        claimed.append(sum(not pool.is_held(block_id) for block_id in there))
    return reused, claimed


def swap_in(tiers: KVTiers, swapped: SwappedBlocks, nodes: Sequence[PrefixNode], blocks: BlockTables) -> list[FetchTarget]:
    """Fill empty tables for a swapped sequence; what the device still has is shared. Its host slots stay held."""
    targets: list[FetchTarget] = []
    for group in tiers.group_ids:
        first = swapped.first[group]
        blocks.num_dropped[group] = first
        blocks.tables[group] = [0] * first
        for position in range(first, first + len(swapped.slots[group])):
            block_id = nodes[position].block_ids[group] if position < len(nodes) else 0
            if block_id:
                tiers.pools.pools[group].share((block_id,))
            blocks.tables[group].append(block_id)
    for group in tiers.group_ids:
        first, table = swapped.first[group], blocks.tables[group]
        for offset, slot in enumerate(swapped.slots[group]):
            position = first + offset
            if not table[position]:
                allocated = tiers.pools.pools[group].allocate(1)
                assert allocated is not None, "a swapped sequence was admitted that does not fit"
                table[position] = allocated[0]
                node = nodes[position] if position < len(nodes) else None
                targets.append(FetchTarget(group, allocated[0], HostSource(group, slot), node))
    blocks.num_positions = len(blocks.tables[0]) * tiers.pools.block_size
    return targets


def release_swapped(tiers: KVTiers, swapped: SwappedBlocks) -> None:
    """Give up the host slots of a sequence that came back or has ended."""
    for group, slots in enumerate(swapped.slots):
        tiers.host[group].release(slots)


def _host_slot(nodes: Sequence[PrefixNode], group: int, position: int) -> int:
    return nodes[position].host_slots[group] if position < len(nodes) else 0
