"""What moves are listed, in which order, and what is found afterwards."""

from __future__ import annotations

import pytest

from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.kv.prefix import PrefixIndex
from jaxinfer.kv.prefix_cache import PrefixCache
from jaxinfer.kv.swap import release_swapped, swap_in, swap_out
from jaxinfer.kv.tables import BlockTables, GroupedPools
from jaxinfer.kv.tiers import KVTiers, PendingFetch, TierLimits
from jaxinfer.messages import CopyBlock, DeleteFromDisk, DiskEntry, HostSource, LoadBlock, SpillBlock, StoreBlock

TENSORS = (KVTensorSpec(name="key", num_heads=1, head_dim=8, dtype="float32"),)
FULL = KVGroupSpec(kind="full", layers=(0,), tensors=TENSORS)
WINDOW = KVGroupSpec(kind="window", window=5, layers=(1,), tensors=TENSORS)
SIZE = 2


class Memory:
    """Tiers with blocks of two tokens, a root, and prompts of one letter per block."""

    def __init__(self, num_blocks: int, host_slots: int = 0, disk_blocks: int = 0, groups=(FULL,), **limits):
        self.pools = GroupedPools(groups, (num_blocks,) * len(groups), SIZE)
        self.index = PrefixIndex(SIZE, len(groups))
        self.disk = DiskIndex(10 * disk_blocks) if disk_blocks else None
        slots = (host_slots,) * len(groups) if host_slots else ()
        self.tiers = KVTiers(self.pools, self.index, TierLimits(host_slots=slots, block_bytes=(10,) * len(groups), **limits), self.disk)
        self.root = self.index.acquire_root()

    def keys(self, letters: str) -> list:
        keys: list = []
        self.index.extend_keys(keys, self.root, [ord(letter) for letter in letters for _ in range(SIZE)], len(letters))
        return keys

    def compute(self, letters: str) -> tuple[BlockTables, list]:
        """A sequence that has computed these blocks and published them."""
        blocks, nodes = self.pools.new_tables(), []
        self.pools.extend(blocks, SIZE * len(letters))
        keys = self.keys(letters)
        PrefixCache(self.tiers).publish(nodes, self.root, keys, len(keys), blocks)
        return blocks, nodes

    def cache(self, letters: str) -> list:
        blocks, nodes = self.compute(letters)
        self.pools.release(blocks)
        return nodes

    def find(self, letters: str):
        return PrefixCache(self.tiers).find(self.root, self.keys(letters))

    def use(self, letters: str):
        """Whoever asks for these blocks and gets what there is; returns tables and targets."""
        blocks = self.pools.new_tables()
        return blocks, PrefixCache(self.tiers).claim(self.find(letters), blocks)

    def check(self, *blocks: BlockTables, swapped=(), fetches=()) -> None:
        self.pools.check(blocks)
        self.tiers.check(list(swapped), list(fetches))

    def moves(self) -> list:
        return self.tiers.take_moves()


def entry_tokens(letters: str) -> tuple[int, ...]:
    return tuple(ord(letter) for letter in letters for _ in range(SIZE))


def test_a_block_that_is_given_out_is_stored_before_and_the_tail_goes_first():
    memory = Memory(num_blocks=3, host_slots=4)
    nodes = memory.cache("abc")
    block_ids = [node.block_ids[0] for node in nodes]
    other = memory.pools.new_tables()
    memory.pools.extend(other, 2 * SIZE)
    moves = memory.moves()
    assert moves == [StoreBlock(0, block_ids[2], nodes[2].host_slots[0]), StoreBlock(0, block_ids[1], nodes[1].host_slots[0])]
    assert [node.block_ids[0] for node in nodes] == [block_ids[0], 0, 0]
    hit = memory.find("abc")
    assert (len(hit.nodes), hit.num_on_device, hit.claimed, hit.num_fetched) == (3, [1], [1], 2)
    memory.check(other)


def test_without_host_memory_an_evicted_block_is_forgotten():
    memory = Memory(num_blocks=3)
    memory.cache("abc")
    other = memory.pools.new_tables()
    memory.pools.extend(other, 2 * SIZE)
    assert memory.moves() == []
    assert len(memory.find("abc").nodes) == 1 == memory.index.num_nodes
    memory.check(other)


def test_a_block_that_is_on_the_host_already_is_not_stored_again():
    memory = Memory(num_blocks=2, host_slots=4)
    memory.cache("ab")
    memory.cache("xy")  # "ab" goes to the host
    assert len(memory.moves()) == 2
    blocks, targets = memory.use("ab")  # and "xy" after it
    assert memory.moves() == [
        StoreBlock(0, target.block_id, memory.find("xy").nodes[n].host_slots[0]) for n, target in ((1, targets[0]), (0, targets[1]))
    ]
    fetch = PendingFetch(0, targets, memory.tiers.pin(targets))
    memory.check(blocks, fetches=[fetch])
    memory.tiers.load(fetch, is_swap=False)
    memory.tiers.unpin(fetch.pinned)
    assert memory.moves() == [LoadBlock(0, 0, 0, targets[0].block_id), LoadBlock(0, 1, 0, targets[1].block_id)]
    memory.pools.release(blocks)
    assert all(node.block_ids[0] and node.host_slots[0] for node in memory.find("ab").nodes)
    memory.cache("pq")
    assert memory.moves() == []  # "ab" was there still
    memory.check()


def test_a_fetch_pins_its_host_slots():
    memory = Memory(num_blocks=2, host_slots=2)
    memory.cache("ab")
    memory.cache("xy")
    memory.moves()
    blocks, targets = memory.use("ab")
    # Both slots are pinned, so "xy" has nowhere to go.
    assert memory.moves() == [] and memory.tiers.host[0].num_available == 0
    assert {target.source for target in targets} == {HostSource(0, slot) for slot in (1, 2)}
    assert memory.find("xy").nodes == []
    memory.tiers.unpin(memory.tiers.pin(targets))
    assert memory.tiers.host[0].num_available == 2
    memory.pools.release(blocks)
    memory.check()


def test_a_host_slot_is_spilled_before_it_is_overwritten():
    memory = Memory(num_blocks=1, host_slots=1, disk_blocks=1)
    memory.cache("a")
    memory.cache("b")
    memory.moves()
    memory.cache("c")
    moves = memory.moves()
    assert [type(move) for move in moves] == [SpillBlock, StoreBlock]
    assert moves[0].host_slot == moves[1].host_slot == 1
    assert moves[0].entry == DiskEntry(memory.keys("a")[0][0], 0, entry_tokens("a"), memory.root.namespace)
    memory.cache("d")
    moves = memory.moves()
    assert [type(move) for move in moves] == [DeleteFromDisk, SpillBlock, StoreBlock]
    assert (moves[0].entry.key, moves[1].entry.token_ids) == (memory.keys("a")[0][0], entry_tokens("b"))
    assert memory.find("a").nodes == []
    (node,) = memory.find("b").nodes
    assert (node.block_ids[0], node.host_slots[0], node.on_disk) == (0, 0, 1)
    memory.check()


def test_what_makes_room_for_a_block_does_not_forget_the_block():
    memory = Memory(num_blocks=2, host_slots=1, disk_blocks=1)
    memory.cache("ab")
    for other in "xyz":
        memory.cache(other)
        memory.cache(other + "q")
    memory.check()


def test_a_second_use_brings_a_prefix_to_disk_with_the_next_step():
    memory = Memory(num_blocks=8, host_slots=8, disk_blocks=8)
    memory.cache("ab")
    blocks, targets = memory.use("ab")
    assert not targets and memory.moves() == []
    memory.tiers.begin_step()
    moves = memory.moves()
    assert [type(move) for move in moves] == [StoreBlock, SpillBlock] * 2
    assert [move.entry.token_ids for move in moves[1::2]] == [entry_tokens("a"), entry_tokens("ab")]
    memory.tiers.begin_step()
    assert memory.moves() == []
    memory.check(blocks)


def test_after_a_failed_write_nothing_is_sent_and_after_a_failed_read_the_rest_is_kept():
    memory = Memory(num_blocks=1, host_slots=1, disk_blocks=9)
    for letter in "abcd":
        memory.cache(letter)
    memory.moves()
    entries = [DiskEntry(memory.keys(letter)[0][0], 0, (), b"") for letter in "ab"]
    memory.tiers.forget_on_disk(entries[:1])
    assert (memory.find("a").nodes, len(memory.find("b").nodes)) == ([], 1)
    memory.cache("e")
    assert any(isinstance(move, SpillBlock) for move in memory.moves())
    memory.tiers.forget_on_disk(entries[1:], is_write=True)
    memory.cache("f")
    assert not any(isinstance(move, SpillBlock) for move in memory.moves())
    assert memory.tiers.counters.num_disk_faults == 2
    memory.check()


def test_fewer_tokens_than_a_copy_is_worth_are_not_fetched():
    for min_fetch_tokens, num_found in ((4, 3), (5, 1), (None, 1)):
        memory = Memory(num_blocks=3, host_slots=4, min_fetch_tokens=min_fetch_tokens)
        memory.cache("abc")
        other = memory.pools.new_tables()
        memory.pools.extend(other, 2 * SIZE)
        assert len(memory.find("abc").nodes) == num_found


def test_a_window_group_needs_what_the_window_sees_and_no_more():
    memory = Memory(num_blocks=8, groups=(FULL, WINDOW))
    blocks, nodes = memory.compute("abcdef")
    memory.pools.drop_dead(blocks, 12)  # position 12 sees 8..12: blocks 4 and 5
    memory.pools.release(blocks)
    assert len(memory.find("abcdef").nodes) == 6
    other = memory.pools.new_tables()
    memory.pools.extend(other, 2 * SIZE)
    lost = [number for number, node in enumerate(nodes) if not node.block_ids[1]]
    # The dead ones were released first, so they go first; nothing behind them that needs them is found.
    assert set(lost) <= {0, 1, 2, 3}
    claimed = memory.pools.new_tables()
    assert PrefixCache(memory.tiers).claim(memory.find("abcdef"), claimed) == []
    assert claimed.num_dropped == [0, 4] and claimed.tables[1][:4] == [0, 0, 0, 0]
    memory.check(other, claimed)


def test_swap_holds_its_slots_and_shares_those_of_cached_prefixes():
    memory = Memory(num_blocks=4, host_slots=3)
    blocks, nodes = memory.compute("abc")
    block_ids = list(blocks.tables[0])
    swapped = swap_out(memory.tiers, blocks, nodes[:2], 5)
    memory.pools.release(blocks)
    assert swapped.num_tokens == 5
    assert memory.moves() == [StoreBlock(0, block_id, slot) for block_id, slot in zip(block_ids, swapped.slots[0], strict=True)]
    assert [node.host_slots[0] for node in nodes] == [*swapped.slots[0][:2], 0]
    memory.check(swapped=[swapped])
    assert swap_out(memory.tiers, blocks, [], 5) is None  # no slot is left
    targets = swap_in(memory.tiers, swapped, nodes[:2], blocks)
    assert blocks.tables[0][:2] == block_ids[:2] and [target.source for target in targets] == [HostSource(0, swapped.slots[0][2])]
    assert targets[0].node is None
    release_swapped(memory.tiers, swapped)
    assert (memory.tiers.host[0].num_cached, memory.tiers.host[0].num_free) == (2, 1)
    memory.check(blocks)


def test_a_fork_shares_full_blocks_and_copies_the_last():
    memory = Memory(num_blocks=8, groups=(FULL, WINDOW))
    source, target = memory.compute("abcd")[0], memory.pools.new_tables()
    memory.tiers.share_tables(source, target, 7)
    assert memory.moves() == [CopyBlock(group, source.tables[group][3], target.tables[group][3]) for group in (0, 1)]
    for group in (0, 1):
        assert target.tables[group][:3] == source.tables[group][:3] and target.tables[group][3] != source.tables[group][3]
    aligned = memory.pools.new_tables()
    memory.tiers.share_tables(source, aligned, 4)
    assert memory.moves() == [] and aligned.num_positions == 4
    memory.check(source, target, aligned)


@pytest.mark.parametrize("disk_blocks", [3, 8])
def test_closing_brings_to_disk_what_was_used_last(disk_blocks):
    memory = Memory(num_blocks=4, host_slots=2, disk_blocks=disk_blocks)
    memory.cache("abcd")
    memory.cache("wxyz")
    memory.moves()
    memory.tiers.flush_to_disk()
    moves = memory.moves()
    assert all(move.block_id for move in moves if isinstance(move, StoreBlock))
    spilled = [move.entry.token_ids for move in moves if isinstance(move, SpillBlock)]
    assert len(spilled) == len(set(spilled)) >= min(disk_blocks, 6)
    memory.check()


def test_closing_stores_nothing_that_has_left_every_tier_meanwhile():
    memory = Memory(num_blocks=1, host_slots=2, disk_blocks=3)
    for letter in "xwv":
        memory.cache(letter)
        blocks, _ = memory.use(letter)
        memory.pools.release(blocks)
        memory.tiers.begin_step()
    assert memory.disk.adopt(memory.keys("x")[0][0], 0, memory.find("x").nodes[0])
    memory.cache("a")
    memory.moves()
    # Host: w, v. Disk: w, v, x. Bringing "a" there takes w's place in both, before it is w's turn.
    memory.tiers.flush_to_disk()
    moves = memory.moves()
    assert [type(move) for move in moves] == [StoreBlock, DeleteFromDisk, SpillBlock]
    assert moves[1].entry.key == memory.keys("w")[0][0] and moves[2].entry.token_ids == entry_tokens("a")
    assert memory.find("w").nodes == []
    memory.check()
