"""KV blocks as numbers on the host: which are free, cached or held. No jax; the memory itself is in `kv.cache`."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxinfer.errors import ConfigError

TRASH_BLOCK = 0
"""Where padding is written and where a window's table points once a block fell out of it; never given out."""
EVICTED_TOGETHER = 32
EVICTED_SHARE = 256
"""At most this fraction of what is cached is evicted before it must be."""


class BlockPool:
    """The blocks 1..num_blocks of one KV group in one tier, with reference counts.

    A block is held (somebody has a reference), cached (nobody has, its content may be wanted again) or free. Cached blocks
    are given out when the free ones have run out, the least recently released first; `on_evict` is
    told before that, with the blocks and their contents.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ConfigError(f"a block pool needs at least 1 usable block, got {num_blocks}", option="--num-kv-blocks")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[list[tuple[int, Any]]], None] | None = None
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        # A dict would pass over every entry that was ever deleted at its front to find the first one that is there.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * (num_blocks + 1)
        self._contents: list[Any] = [None] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks without content that nobody holds."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_available

    def is_held(self, block_id: int) -> bool:
        """Whether anybody has a reference to it."""
        return self._ref_counts[block_id] > 0

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks, each with one reference; None when there are too few, and nothing is taken then."""
        if num_blocks > self.num_available:
            return None
        free = self._free
        if num_blocks > len(free):
            self._evict(num_blocks - len(free))
        block_ids = [free.popleft() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are held or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is neither held nor cached"
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block of a table, the last block first.

        Whoever held a block held those before it, so that of one prefix the tail is always evicted before the head.
        """
        for block_id in reversed(block_ids):
            assert block_id != TRASH_BLOCK and self._ref_counts[block_id] > 0, f"block {block_id} is not held"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._contents[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def keep(self, block_id: int, content: Any) -> None:
        """Let a held block stay cached under `content` when its last reference goes."""
        assert self._ref_counts[block_id] > 0 and self._contents[block_id] is None, f"block {block_id} is not held or has a content"
        self._contents[block_id] = content

    def content(self, block_id: int) -> Any:
        """What `keep` was told of a block, None for one without."""
        return self._contents[block_id]

    def cached(self) -> list[int]:
        """The cached blocks, the next to be evicted first."""
        return list(self._cached)

    def ref_counts(self) -> list[int]:
        """References of the blocks 1..num_blocks."""
        return self._ref_counts[1:]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert conservation: free + cached + held = total, and each reference count is the number of holders in `tables`."""
        holders = Counter(block_id for table in tables for block_id in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free queue twice"
        assert TRASH_BLOCK not in free and TRASH_BLOCK not in holders and TRASH_BLOCK not in self._cached, "the trash block was given out"
        for block_id in range(1, self.num_blocks + 1):
            count, is_kept = self._ref_counts[block_id], self._contents[block_id] is not None
            assert count == holders[block_id], f"block {block_id} has {count} references but {holders[block_id]} holders"
            assert (block_id in free) == (count == 0 and not is_kept), f"block {block_id}: {count} references, content {is_kept}"
            assert (block_id in self._cached) == (count == 0 and is_kept), f"block {block_id}: {count} references, content {is_kept}"
        assert len(free) + len(self._cached) + len(holders) == self.num_blocks, "free + cached + held is not the total"

    def _evict(self, num_blocks: int) -> None:
        """Make cached blocks free: so many, and of a large cache a few more, since together they cost less."""
        num_blocks = max(num_blocks, min(EVICTED_TOGETHER, len(self._cached) // EVICTED_SHARE))
        evicted = []
        for _ in range(num_blocks):
            block_id, _ = self._cached.popitem(last=False)
            evicted.append((block_id, self._contents[block_id]))
            self._contents[block_id] = None
        if self.on_evict is not None:
            self.on_evict(evicted)
        self._free.extend(block_id for block_id, _ in evicted)
