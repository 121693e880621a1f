from __future__ import annotations

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.kv.block_pool import TRASH_BLOCK, BlockPool, GroupedPools
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec

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
        with pytest.raises(AssertionError, match="not held"):
            misuse(block)
        with pytest.raises(AssertionError, match="not held"):
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
