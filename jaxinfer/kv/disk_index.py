"""Which blocks lie on disk and how many bytes they take; the files themselves are `kv.disk`'s. No jax."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from jaxinfer.kv.prefix import PrefixNode


class DiskIndex:
    """Blocks on disk by (key, group), the least recently used first.

    Args:
        max_bytes: most bytes of all blocks.
        entries: (key, group, bytes) of what an earlier process left there, the oldest first.
    """

    def __init__(self, max_bytes: int, entries: Iterable[tuple[bytes, int, int]] = ()):
        self.max_bytes = max_bytes
        self.used_bytes = 0
        # A dict would pass over every entry that was ever deleted at its front to find the first one that is there.
        self._sizes: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._nodes: dict[tuple[bytes, int], PrefixNode] = {}
        self._num_by_key: dict[bytes, int] = {}
        for key, group, num_bytes in entries:
            self._put(key, group, num_bytes)

    def __len__(self) -> int:
        return len(self._sizes)

    def has_any(self, key: bytes) -> bool:
        """Whether any group's block of a key is there."""
        return key in self._num_by_key

    def adopt(self, key: bytes, group: int, node: PrefixNode) -> bool:
        """Tie an entry to the node that was looked up under its key; False where there is none, or it is another node's.

        The entry becomes the most recently used one. Whether its tokens are the node's is seen when it is read.
        """
        name = (key, group)
        if name not in self._sizes or self._nodes.setdefault(name, node) is not node:
            return False
        self._sizes.move_to_end(name)
        return True

    def add(self, key: bytes, group: int, num_bytes: int, node: PrefixNode) -> None:
        """Note a block that is being written."""
        self._put(key, group, num_bytes)
        self._nodes[key, group] = node

    def make_room(self, num_bytes: int) -> list[tuple[bytes, int, PrefixNode | None]] | None:
        """Entries that went to make room for so many bytes; None when there can never be enough."""
        if num_bytes > self.max_bytes:
            return None
        evicted = []
        while self.used_bytes + num_bytes > self.max_bytes:
            key, group = next(iter(self._sizes))
            evicted.append((key, group, self.remove(key, group)))
        return evicted

    def remove(self, key: bytes, group: int) -> PrefixNode | None:
        """Forget an entry; returns its node, if it has one."""
        num_bytes = self._sizes.pop((key, group), None)
        if num_bytes is None:
            return None
        self.used_bytes -= num_bytes
        self._num_by_key[key] -= 1
        if not self._num_by_key[key]:
            del self._num_by_key[key]
        return self._nodes.pop((key, group), None)

    def _put(self, key: bytes, group: int, num_bytes: int) -> None:
        self.remove(key, group)
        self._sizes[key, group] = num_bytes
        self.used_bytes += num_bytes
        self._num_by_key[key] = self._num_by_key.get(key, 0) + 1
