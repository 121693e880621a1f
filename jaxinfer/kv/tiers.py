"""KV blocks in three tiers: device, host memory, disk; what is found where, and what must be moved. No jax.

The device tier is `GroupedPools`. The host tier is a second pool of slots per KV group: cached prefixes that left the device,
and what preempted sequences hold. The disk tier keeps what leaves the host tier. Nothing is moved here: moves are listed in
the order in which they must happen, and whoever computes the step carries them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxinfer.kv.block_pool import BlockPool
from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.prefix import PrefixIndex, PrefixNode, PrefixRoot
from jaxinfer.kv.tables import BlockTables, GroupedPools
from jaxinfer.messages import BlockMove, CopyBlock, DeleteFromDisk, DiskEntry, HostSource, LoadBlock, SpillBlock, StoreBlock

WRITTEN_PER_STEP = 4
"""Blocks of a prefix that was used again that go to disk in one step."""


@dataclass(slots=True)
class KVCounters:
    """What the tiers have done; only grows."""

    num_prefix_query_tokens: int = 0
    num_hit_tokens_device: int = 0
    num_hit_tokens_host: int = 0
    num_hit_tokens_disk: int = 0
    num_preemptions_swap: int = 0
    num_preemptions_recompute: int = 0
    num_recomputed_tokens: int = 0
    """Tokens whose KV was given up by preemption without being kept."""
    num_swapped_out_bytes: int = 0
    num_swapped_in_bytes: int = 0
    num_disk_faults: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TierLimits:
    """How much the lower tiers hold, and from which length they are used.

    `host_slots[g]`: blocks of group g in host memory; empty: no host tier. `block_bytes[g]`: bytes of one block.
    `min_swap_tokens` and `min_fetch_tokens`: fewer tokens are computed again faster than they are copied; None: copying never pays.
    """

    host_slots: tuple[int, ...] = ()
    block_bytes: tuple[int, ...] = ()
    min_swap_tokens: int | None = 0
    min_fetch_tokens: int | None = 0


@dataclass(slots=True)
class FetchTarget:
    """Where one source of a fetch goes. `node` is None for a block that only its sequence knows."""

    group: int
    block_id: int
    source: HostSource | DiskEntry
    node: PrefixNode | None


@dataclass(slots=True)
class SwappedBlocks:
    """A preempted sequence in host memory: `slots[g]` from block `first[g]` on, held by it."""

    first: list[int]
    slots: list[list[int]]
    num_tokens: int


@dataclass(slots=True)
class PendingFetch:
    """What a sequence waits for: its targets, and the host slots that are pinned until they are loaded."""

    ticket: int
    targets: list[FetchTarget]
    pinned: list[tuple[int, int]] = field(default_factory=list)


class KVTiers:
    """Everything the scheduler knows of KV memory.

    Args:
        pools: the device's blocks.
        index: cached prefixes; None: nothing is shared between requests.
        limits: of the host tier.
        disk: of the disk tier; needs `index` and a host tier.
    """

    def __init__(
        self, pools: GroupedPools, index: PrefixIndex | None = None, limits: TierLimits | None = None, disk: DiskIndex | None = None
    ):
        self.pools = pools
        self.index = index
        self.limits = limits or TierLimits()
        self.host = tuple(BlockPool(count) for count in self.limits.host_slots)
        self.disk = disk
        self.counters = KVCounters()
        self.moves: list[BlockMove] = []
        """What has to happen before the next step's rows are computed, in order."""
        self.group_ids = range(len(pools.pools))
        self.writes_to_disk = disk is not None
        self.used_again: deque[PrefixNode] = deque()
        for group, pool in enumerate(pools.pools):
            pool.on_evict = partial(self._leave_device, group)
        for group, pool in enumerate(self.host):
            pool.on_evict = partial(self._leave_host, group)

    def begin_step(self) -> None:
        """What was found a second time is worth keeping beyond this process: it goes to disk now, not when it is evicted.

        Now and not when it was found: then it may not have been computed yet. A few blocks in each step: whoever found them
        waits for this step.
        """
        num_written = 0
        while self.used_again and num_written < WRITTEN_PER_STEP:
            node = self.used_again.popleft()
            for group in self.group_ids:
                if (node.block_ids[group] or node.host_slots[group]) and not node.on_disk >> group & 1:
                    self._copy_to_disk(node, group, node.block_ids[group])
                    num_written += 1

    def take_moves(self) -> list[BlockMove]:
        """The moves listed so far; they are the caller's now."""
        moves, self.moves = self.moves, []
        return moves

    def share_tables(self, source: BlockTables, target: BlockTables, num_tokens: int) -> None:
        """Give an empty table the blocks of another one below `num_tokens`; the last, if only partly filled, is copied."""
        size = self.pools.block_size
        num_full = num_tokens // size
        for group, pool in enumerate(self.pools.pools):
            first = source.num_dropped[group]
            pool.share(source.tables[group][first:num_full])
            target.tables[group] = source.tables[group][:num_full]
            target.num_dropped[group] = first
        if num_tokens % size:
            for group, pool in enumerate(self.pools.pools):
                copy = pool.allocate(1)
                assert copy is not None, "a fork was admitted that does not fit"
                target.tables[group].append(copy[0])
                self.moves.append(CopyBlock(group, source.tables[group][num_full], copy[0]))
        target.num_positions = len(target.tables[0]) * size

    # ---- fetches ---------------------------------------------------------------------------------------------------

    def pin(self, targets: Sequence[FetchTarget]) -> list[tuple[int, int]]:
        """The host slots that `claim` holds for a fetch."""
        return [(target.group, target.source.host_slot) for target in targets if isinstance(target.source, HostSource)]

    def unpin(self, pinned: Iterable[tuple[int, int]]) -> None:
        """Let go of a fetch's host slots: they were loaded, or nobody waits any more."""
        for group, slot in pinned:
            self.host[group].release((slot,))

    def load(self, fetch: PendingFetch, *, is_swap: bool) -> None:
        """List the moves that put a finished fetch in place, and make the blocks findable."""
        for index, target in enumerate(fetch.targets):
            self.moves.append(LoadBlock(fetch.ticket, index, target.group, target.block_id))
            if is_swap:
                self.counters.num_swapped_in_bytes += self.block_bytes(target.group)
            elif target.group == 0:
                is_host = isinstance(target.source, HostSource)
                self.counters.num_hit_tokens_host += self.pools.block_size * is_host
                self.counters.num_hit_tokens_disk += self.pools.block_size * (not is_host)
            if target.node is not None:
                self.settle(target.node, target.group, target.block_id)

    def forget_on_disk(self, entries: Iterable[DiskEntry], *, is_write: bool = False) -> None:
        """The disk does not have these after all; after a failed write (`is_write`) nothing more is sent there."""
        assert self.disk is not None
        self.writes_to_disk &= not is_write
        for entry in entries:
            self.counters.num_disk_faults += 1
            node = self.disk.remove(entry.key, entry.group)
            if node is not None:
                self._leave_disk(entry.group, node)

    def flush_to_disk(self) -> None:
        """List what brings the most recently used cached blocks to disk, as many as it holds; for when the engine closes."""
        if self.disk is None or not self.writes_to_disk:
            return
        room = self.disk.max_bytes
        for group in self.group_ids:
            blocks = [(self.pools.pools[group].content(block), block) for block in reversed(self.pools.pools[group].cached())]
            hosted = [(self.host[group].content(slot), 0) for slot in reversed(self.host[group].cached())]
            for node, block_id in [*blocks, *hosted]:
                room -= self.block_bytes(group)
                if room < 0:
                    return
                # It may have left the host for the sake of an earlier one, and even the disk again.
                if (block_id or node.host_slots[group]) and not node.on_disk >> group & 1:
                    self._copy_to_disk(node, group, block_id)

    def check(self, swapped: Sequence[SwappedBlocks], fetches: Sequence[PendingFetch]) -> None:
        """Assert what must hold between any two calls, given all swapped sequences and fetches under way."""
        for group, pool in enumerate(self.host):
            pinned = [slot for fetch in fetches for pinned_group, slot in fetch.pinned if pinned_group == group]
            pool.check([*(one.slots[group] for one in swapped), pinned])
        if self.index is not None:
            self.index.check()
        for group in self.group_ids:
            for tier, name in ((self.pools.pools, "block_ids"), (self.host, "host_slots")):
                if tier:
                    pool = tier[group]
                    for block_id in range(1, pool.num_blocks + 1):
                        node = pool.content(block_id)
                        assert node is None or (node.is_indexed and getattr(node, name)[group] == block_id), (
                            f"{name}: a node lies elsewhere or cannot be found"
                        )

    # ---- between the tiers ------------------------------------------------------------------------------------------

    def source(self, node: PrefixNode, group: int) -> HostSource | DiskEntry:
        """Where below the device a node's block of one group is to be had."""
        return HostSource(group, node.host_slots[group]) if node.host_slots[group] else self._entry(node, group)

    def _entry(self, node: PrefixNode, group: int) -> DiskEntry:
        root = node.root()
        assert isinstance(root, PrefixRoot)
        return DiskEntry(node.key, group, node.prefix(), root.namespace)

    def settle(self, node: PrefixNode, group: int, block_id: int) -> None:
        """Note that a held block has a node's content, unless another block has it already or nobody can find the node."""
        if block_id and node.is_indexed and not node.block_ids[group]:
            node.block_ids[group] = block_id
            self.pools.pools[group].keep(block_id, node)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group; 0 where nobody has said."""
        return self.limits.block_bytes[group] if self.limits.block_bytes else 0

    def store(self, group: int, block_id: int) -> int:
        """Copy a device block to a host slot, which the caller holds; there must be one to be had."""
        slots = self.host[group].allocate(1)
        assert slots is not None
        self.moves.append(StoreBlock(group, block_id, slots[0]))
        return slots[0]

    def _leave_device(self, group: int, evicted: list[tuple[int, PrefixNode]]) -> None:
        """Cached blocks are about to be given out: their contents go to the host tier, as far as there is room."""
        if self.host:
            self._keep_on_host(group, [(block_id, node) for block_id, node in evicted if not node.host_slots[group]])
        for _, node in evicted:
            node.block_ids[group] = 0  # Only now: making room for it on the host must not forget it meanwhile.
            if not node.host_slots[group]:
                self.prune(node)

    def _keep_on_host(self, group: int, leaving: list[tuple[int, PrefixNode]]) -> None:
        """Copy device blocks to host slots, where they are cached in this order; the last ones if there are too many."""
        host = self.host[group]
        leaving = leaving[max(0, len(leaving) - host.num_available) :]
        slots = host.allocate(len(leaving)) or []
        for (block_id, node), slot in zip(leaving, slots, strict=True):
            self.moves.append(StoreBlock(group, block_id, slot))
            node.host_slots[group] = slot
            host.keep(slot, node)
        host.release(slots[::-1])

    def _leave_host(self, group: int, evicted: list[tuple[int, PrefixNode]]) -> None:
        for slot, node in evicted:
            if not node.on_disk >> group & 1:
                self._spill(node, group, slot)
            node.host_slots[group] = 0
            self.prune(node)

    def _spill(self, node: PrefixNode, group: int, slot: int) -> None:
        """List the move from a host slot to disk, and what must go there for it."""
        if self.disk is None or not self.writes_to_disk:
            return
        other = self.disk.remove(node.key, group)
        if other is not None:  # Another prefix with the same key: its file is overwritten.
            self._leave_disk(group, other)
        evicted = self.disk.make_room(self.block_bytes(group))
        if evicted is None:
            return
        for key, old_group, old in evicted:
            self.moves.append(DeleteFromDisk(DiskEntry(key, old_group, (), b"")))
            if old is not None:
                self._leave_disk(old_group, old)
        self.moves.append(SpillBlock(group, slot, self._entry(node, group)))
        self.disk.add(node.key, group, self.block_bytes(group), node)
        node.on_disk |= 1 << group

    def _leave_disk(self, group: int, node: PrefixNode) -> None:
        node.on_disk &= ~(1 << group)
        self.prune(node)

    def _copy_to_disk(self, node: PrefixNode, group: int, block_id: int) -> None:
        if not node.host_slots[group]:
            if not self.host[group].num_available:
                return
            self._keep_on_host(group, [(block_id, node)])
        self._spill(node, group, node.host_slots[group])

    def prune(self, node: PrefixNode) -> None:
        """Forget a node that no tier has any more."""
        if self.index is not None:
            self.index.prune(node)
