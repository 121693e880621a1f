"""Cached prefixes: the longest one there is for a sequence, in whatever tier, and new ones made findable. No jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.kv.prefix import BlockKey, PrefixNode
from jaxinfer.kv.tables import BlockTables
from jaxinfer.kv.tiers import FetchTarget, KVTiers


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix: `nodes` from the first block on, some of them not on the device."""

    nodes: list[PrefixNode]
    claimed: list[int]
    """Device blocks per group that using it takes from what is available, beside those that must be allocated."""
    num_on_device: list[int]
    num_fetched: int
    """Blocks, over all groups, that must come from a lower tier."""


class PrefixCache:
    """Look-up and publication of prefixes over the tiers, whose index must be there."""

    def __init__(self, tiers: KVTiers):
        self._tiers = tiers
        self._keeps_all = [group for group in tiers.group_ids if tiers.pools.groups[group].window is None]

    def find(self, root: PrefixNode, keys: Sequence[BlockKey]) -> PrefixHit:
        """The longest prefix, in whole blocks of `keys`, of which every group has what tokens behind it may still see."""
        nodes = self._chain(root, keys)
        count = self._longest_visible(nodes)
        hit = self._hit(nodes[:count])
        if hit.num_fetched:
            num_on_device = self._longest_visible(nodes[: self._leading_on_device(nodes)], _is_on_device)
            num_fetched_tokens = (count - num_on_device) * self._tiers.pools.block_size
            if self._tiers.limits.min_fetch_tokens is None or num_fetched_tokens < self._tiers.limits.min_fetch_tokens:
                hit = self._hit(nodes[:num_on_device])
        return hit

    def claim(self, hit: PrefixHit, blocks: BlockTables) -> list[FetchTarget]:
        """Fill empty tables with a hit's blocks, allocating those that must be fetched; whoever asks made sure they fit.

        Returns where the fetched ones go; their host slots are pinned.
        """
        num_tokens = len(hit.nodes) * self._tiers.pools.block_size
        targets: list[FetchTarget] = []
        # All that is there is held before anything is allocated, which may evict it.
        for group in self._tiers.group_ids:
            first = self._tiers.pools.first_needed(group, num_tokens)
            blocks.num_dropped[group] = first
            blocks.tables[group] = [0] * first
            for node in hit.nodes[first:]:
                if node.block_ids[group]:
                    self._tiers.pools.pools[group].share((node.block_ids[group],))
                elif node.host_slots[group]:
                    self._tiers.host[group].share((node.host_slots[group],))
        for group in self._tiers.group_ids:
            for node in hit.nodes[blocks.num_dropped[group] :]:
                block_id = node.block_ids[group]
                if not block_id:
                    allocated = self._tiers.pools.pools[group].allocate(1)
                    assert allocated is not None, "a hit was claimed that does not fit"
                    block_id = allocated[0]
                    targets.append(FetchTarget(group, block_id, self._tiers.source(node, group), node))
                blocks.tables[group].append(block_id)
        blocks.num_positions = num_tokens
        num_fetched = sum(target.group == 0 for target in targets)
        self._tiers.counters.num_hit_tokens_device += num_tokens - num_fetched * self._tiers.pools.block_size
        if self._tiers.writes_to_disk:
            self._tiers.used_again.extend(node for node in hit.nodes if not node.on_disk)
        return targets

    def publish(self, nodes: list[PrefixNode], root: PrefixNode, keys: Sequence[BlockKey], count: int, blocks: BlockTables) -> None:
        """Make a sequence's first `count` blocks, which are full, findable; `nodes` are those published before, and grow."""
        assert self._tiers.index is not None
        while nodes and not nodes[-1].is_indexed:
            nodes.pop()  # Forgotten while another block stood for it; this sequence still has its own.
        for position in range(len(nodes), count):
            parent = nodes[-1] if nodes else root
            key, tokens = keys[position]
            node = self._tiers.index.find(parent, key, tokens) or self._tiers.index.insert(parent, key, tokens)
            nodes.append(node)
            for group in self._tiers.group_ids:
                self._tiers.settle(node, group, blocks.tables[group][position])

    def _chain(self, root: PrefixNode, keys: Sequence[BlockKey]) -> list[PrefixNode]:
        """Nodes from the first block on, as far as the groups that keep everything have them."""
        if self._tiers.index is None:
            return []
        nodes, node = [], root
        for key, tokens in keys:
            child = self._tiers.index.find(node, key, tokens)
            if self._tiers.disk is not None and self._tiers.disk.has_any(key):
                child = child or self._tiers.index.insert(node, key, tokens)
                self._note_disk(child)
            if child is None:
                break
            if child.is_nowhere or not all(child.is_somewhere(group) for group in self._keeps_all):
                self._tiers.prune(child)
                break
            nodes.append(child)
            node = child
        return nodes

    def _note_disk(self, node: PrefixNode) -> None:
        assert self._tiers.disk is not None
        for group in self._tiers.group_ids:
            if not node.on_disk >> group & 1 and self._tiers.disk.adopt(node.key, group, node):
                node.on_disk |= 1 << group

    def _longest_visible(self, nodes: Sequence[PrefixNode], is_there: Callable[[PrefixNode, int], object] = PrefixNode.is_somewhere) -> int:
        """The most leading nodes behind which every window group has all that its window still sees."""
        count = len(nodes)
        for group in self._tiers.group_ids if self._tiers.pools.has_windows else ():
            if self._tiers.pools.groups[group].window is None:
                continue
            runs, run = [0], 0
            for node in nodes:
                run = run + 1 if is_there(node, group) else 0
                runs.append(run)
            while count and runs[count] < count - self._tiers.pools.first_needed(group, count * self._tiers.pools.block_size):
                count -= 1
        return count

    def _leading_on_device(self, nodes: Sequence[PrefixNode]) -> int:
        for count, node in enumerate(nodes):
            if not all(node.block_ids[group] for group in self._keeps_all):
                return count
        return len(nodes)

    def _hit(self, nodes: list[PrefixNode]) -> PrefixHit:
        claimed, on_device, num_fetched = [], [], 0
        num_tokens = len(nodes) * self._tiers.pools.block_size
        for group, pool in enumerate(self._tiers.pools.pools):
            block_ids = [node.block_ids[group] for node in nodes[self._tiers.pools.first_needed(group, num_tokens) :]]
            there = [block_id for block_id in block_ids if block_id]
            claimed.append(sum(not pool.is_held(block_id) for block_id in there))
            on_device.append(len(there))
            num_fetched += len(block_ids) - len(there)
        return PrefixHit(nodes, claimed, on_device, num_fetched)


def _is_on_device(node: PrefixNode, group: int) -> bool:
    return node.block_ids[group] != 0
