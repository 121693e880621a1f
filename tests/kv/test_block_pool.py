from __future__ import annotations

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.kv.block_pool import TRASH_BLOCK, BlockPool
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.kv.tables import GroupedPools

TENSORS = (KVTensorSpec(name="key", num_heads=1, head_dim=8, dtype="float32"),)
FULL = KVGroupSpec(kind="full", layers=(0,), tensors=TENSORS)
WINDOW = KVGroupSpec(kind="window", window=4, layers=(1,), tensors=TENSORS)


def test_every_usable_block_is_given_out_once_and_never_the_trash_block():
    pool = BlockPool(5)
    blocks = pool.allocate(2) + pool.allocate(3)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert TRASH_BLOCK not in blocks
    assert (pool.num_free, pool.num_held) == (0, 5)


def test_running_out_is_a_value_and_takes_nothing():
    pool = BlockPool(3)
    held = pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(0) == []
    pool.check([held])


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.share(block)
    pool.check([block, block])
    pool.release(block)
    assert pool.num_free == 1
    pool.check([block])
    pool.release(block)
    assert pool.num_free == 2


def test_the_tail_of_a_released_table_is_reused_before_its_head():
    pool = BlockPool(4)
    table = pool.allocate(4)
    pool.release(table)
    assert pool.allocate(4) == table[::-1]


def test_a_block_that_is_not_held_can_be_neither_released_nor_shared():
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.release(block)
    for misuse in (pool.release, pool.share):
        with pytest.raises(AssertionError, match="held"):
            misuse(block)
        with pytest.raises(AssertionError, match="held"):
            misuse([TRASH_BLOCK])


@pytest.mark.parametrize("tables", [[], [[1], [1]], [[1, 2]], [[2]]], ids=["leaked", "held twice", "free and held", "another"])
def test_check_notices_a_broken_conservation(tables):
    pool = BlockPool(3)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError):
        pool.check(tables)
    pool.check([[1]])


def test_pools_are_refused_without_blocks_or_without_a_size_for_each_group():
    with pytest.raises(ConfigError, match="at least 1 usable block, got 0"):
        BlockPool(0)
    with pytest.raises(ConfigError, match="2 groups and 1 sizes"):
        GroupedPools([FULL, WINDOW], [4], 2)


def test_a_window_frees_blocks_that_no_later_position_sees_and_keeps_the_index():
    pools = GroupedPools([FULL, WINDOW], [8, 8], 2)
    blocks = pools.new_tables()
    pools.extend(blocks, 8)
    window_table = list(blocks.tables[1])
    pools.drop_dead(blocks, 6)  # position 6 sees 3..6, so block 0 (positions 0, 1) is dead and block 1 (2, 3) is not
    assert blocks.tables[1] == [TRASH_BLOCK, *window_table[1:]]
    assert len(blocks.tables[0]) == 4 and TRASH_BLOCK not in blocks.tables[0]
    assert [pool.num_free for pool in pools.pools] == [4, 5]
    pools.drop_dead(blocks, 7)  # position 7 sees 4..7
    assert blocks.tables[1] == [TRASH_BLOCK, TRASH_BLOCK, *window_table[2:]]
    pools.check([blocks])
    pools.release(blocks)
    assert [pool.num_free for pool in pools.pools] == [8, 8]
    pools.check([blocks])


def test_the_scarcest_group_decides_how_far_a_sequence_may_grow():
    pools = GroupedPools([FULL, WINDOW], [8, 3], 2)
    blocks = pools.new_tables()
    assert pools.fitting_end(blocks, 5) == 5
    assert pools.fitting_end(blocks, 100) == 6
    pools.extend(blocks, 5)
    assert blocks.num_positions == 6
    assert pools.fitting_end(blocks, 100) == 6


def kept_pool(num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    """A pool whose first three blocks are cached under "a", "b" and "c" of one table."""
    pool = BlockPool(num_blocks)
    table = pool.allocate(3)
    for block_id, content in zip(table, "abc", strict=True):
        pool.keep(block_id, content)
    pool.release(table)
    return pool, table


def test_a_released_block_with_a_content_is_cached_and_can_be_held_again():
    pool, table = kept_pool()
    assert (pool.num_free, pool.num_cached, pool.num_held, pool.num_available) == (1, 3, 0, 4)
    pool.share(table[:1])
    assert (pool.num_free, pool.num_cached, pool.num_held, pool.num_available) == (1, 2, 1, 3)
    assert pool.content(table[0]) == "a"
    pool.check([table[:1]])
    pool.release(table[:1])
    pool.check([])


def test_free_blocks_go_first_and_then_the_cached_ones_from_the_tail():
    pool, table = kept_pool()
    evicted = []
    pool.on_evict = evicted.extend
    assert pool.allocate(1) == [4] and not evicted
    assert pool.cached() == table[::-1]
    assert pool.allocate(2) == [table[2], table[1]]
    assert evicted == [(table[2], "c"), (table[1], "b")]
    assert (pool.num_cached, pool.content(table[2])) == (1, None)
    pool.check([[4], [table[2]], [table[1]]])


def test_what_was_used_last_is_evicted_last():
    pool, table = kept_pool()
    pool.share(table[2:])
    pool.release(table[2:])
    assert pool.cached() == [table[1], table[0], table[2]]


def test_a_held_block_is_never_evicted():
    pool, table = kept_pool()
    pool.share(table)
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [4]
    pool.check([table, [4]])


def test_a_cached_block_that_two_share_is_cached_again_after_both():
    pool, table = kept_pool()
    pool.share(table)
    pool.share(table)
    pool.check([table, table])
    pool.release(table)
    assert pool.num_cached == 0
    pool.release(table)
    assert pool.num_cached == 3


def test_a_content_belongs_to_a_held_block_without_one():
    pool, table = kept_pool()
    for block_id in (table[0], 4):
        with pytest.raises(AssertionError):
            pool.keep(block_id, "d")
    pool.share(table[:1])
    with pytest.raises(AssertionError):
        pool.keep(table[0], "d")
