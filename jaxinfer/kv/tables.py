"""Which blocks a sequence has, per KV group, and how its tables grow and shrink. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxinfer.errors import ConfigError
from jaxinfer.kv.block_pool import TRASH_BLOCK, BlockPool
from jaxinfer.kv.groups import KVGroupSpec, ceil_div


class BlockTables:
    """One sequence's blocks, one table per group.

    `tables[g][i]` is the block of positions `i * block_size` onward. The first `num_dropped[g]` entries have fallen out
    of the group's window: they are the trash block, so that positions keep their index. All tables have one length and
    cover the positions below `num_positions`.
    """

    __slots__ = ("num_dropped", "num_positions", "tables")

    def __init__(self, num_groups: int):
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_dropped = [0] * num_groups
        self.num_positions = 0

    def held(self, group: int) -> list[int]:
        """The blocks of one group that this sequence holds, the trash block left out."""
        return self.tables[group][self.num_dropped[group] :]


class GroupedPools:
    """One BlockPool per KV group, and the rules by which a sequence's tables grow and shrink in all of them."""

    def __init__(self, groups: Sequence[KVGroupSpec], num_blocks: Sequence[int], block_size: int):
        if not groups or len(groups) != len(num_blocks):
            raise ConfigError(f"each KV group needs one pool size, got {len(groups)} groups and {len(num_blocks)} sizes")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self._window_groups = tuple(index for index, group in enumerate(groups) if group.kind == "window")
        self.has_windows = bool(self._window_groups)
        limits = [group.max_tokens(count, block_size) for group, count in zip(groups, num_blocks, strict=True)]
        self.max_seq_tokens: int | None = min((limit for limit in limits if limit is not None), default=None)
        """Tokens one sequence can have with the pools to itself; None: no limit."""

    def new_tables(self) -> BlockTables:
        """Empty tables for one sequence."""
        return BlockTables(len(self.pools))

    def first_needed(self, group: int, num_computed_tokens: int) -> int:
        """The first block of a group that a token from position `num_computed_tokens` on may still see."""
        return self.groups[group].num_dead_blocks(num_computed_tokens, self.block_size)

    def drop_dead(self, blocks: BlockTables, num_computed_tokens: int) -> None:
        """Let go of what has fallen out of every window before position `num_computed_tokens` is computed."""
        for index in self._window_groups:
            num_dead = self.groups[index].num_dead_blocks(num_computed_tokens, self.block_size)
            first = blocks.num_dropped[index]
            if num_dead > first:
                table = blocks.tables[index]
                self.pools[index].release(table[first:num_dead])
                table[first:num_dead] = [TRASH_BLOCK] * (num_dead - first)
                blocks.num_dropped[index] = num_dead

    def fitting_end(self, blocks: BlockTables, end: int) -> int:
        """The position up to which the tables can be extended now, at most `end`."""
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            end = min(end, (len(table) + pool.num_available) * self.block_size)
        return end

    def extend(self, blocks: BlockTables, end: int) -> None:
        """Grow every table to cover the positions below `end`, which must be at most `fitting_end`."""
        num_blocks = ceil_div(end, self.block_size)
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            if num_blocks > len(table):
                new = pool.allocate(num_blocks - len(table))
                assert new is not None, "extend was called without asking fitting_end"
                table.extend(new)
        blocks.num_positions = max(blocks.num_positions, num_blocks * self.block_size)

    def grow(self, blocks: BlockTables) -> bool:
        """Add one block to every table; False, and nothing done, where a pool has none to give."""
        for pool in self.pools:
            if not pool.num_available:
                return False
        for pool, table in zip(self.pools, blocks.tables, strict=True):
            table += pool.allocate(1) or ()
        blocks.num_positions += self.block_size
        return True

    def release(self, blocks: BlockTables) -> None:
        """Give back everything that a sequence holds; its tables are empty afterwards."""
        for index, pool in enumerate(self.pools):
            pool.release(blocks.held(index))
            blocks.tables[index] = []
            blocks.num_dropped[index] = 0
        blocks.num_positions = 0

    def needed(self, num_tokens: int) -> list[int]:
        """Blocks per group that a sequence should find to compute `num_tokens`; never more than the pool has."""
        return [
            min(pool.num_blocks, group.num_blocks_for(num_tokens, self.block_size))
            for pool, group in zip(self.pools, self.groups, strict=True)
        ]

    def check(self, all_blocks: Iterable[BlockTables]) -> None:
        """Assert conservation in every group, given the tables of all living sequences."""
        all_blocks = list(all_blocks)
        for index, pool in enumerate(self.pools):
            pool.check(blocks.held(index) for blocks in all_blocks)
