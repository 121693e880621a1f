"""Which prefixes have KV blocks somewhere: full blocks of tokens as a tree, found by a chain of hashes. No jax."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence

Hash = Callable[[bytes], bytes]
BlockKey = tuple[bytes, bytes]
"""A full block of a sequence: the hash of it and all before it, and its own tokens (see PrefixNode.tokens)."""


def sha256(content: bytes) -> bytes:
    """The hash of block keys: 32 bytes that nobody can find a second content for."""
    return hashlib.sha256(content).digest()


class PrefixNode:
    """One full block of tokens behind all those before it, and where its KV lies.

    A node is told from another by its tokens and by its parent itself, so that two prefixes never mix even where their keys
    are equal. `block_ids[g]` and `host_slots[g]` are 0 where the tier does not have the block; bit g of `on_disk` says
    whether disk has it.
    """

    __slots__ = ("block_ids", "host_slots", "is_indexed", "key", "next_of_key", "num_children", "on_disk", "parent", "tokens")

    def __init__(self, key: bytes, parent: PrefixNode | None, tokens: bytes, nowhere: array[int]):
        self.key = key
        self.parent = parent
        self.tokens = tokens
        """int32 token ids as bytes. Of a hundred thousand nodes nothing but the node itself is seen by the garbage collector."""
        self.next_of_key: PrefixNode | None = None
        """Another node with the same key, which a good hash never gives."""
        self.num_children = 0
        self.is_indexed = False
        self.block_ids = nowhere[:]
        self.host_slots = nowhere[:]
        self.on_disk = 0

    @property
    def is_nowhere(self) -> bool:
        """Whether no tier has any block of it."""
        return not (self.on_disk or any(self.block_ids) or any(self.host_slots))

    def is_somewhere(self, group: int) -> bool:
        """Whether a tier has its block of one group."""
        return bool(self.block_ids[group] or self.host_slots[group] or self.on_disk >> group & 1)

    def prefix(self) -> tuple[int, ...]:
        """All tokens up to the end of this block."""
        runs, node = [], self
        while node.parent is not None:
            runs.append(node.tokens)
            node = node.parent
        return tuple(array("i", b"".join(reversed(runs))))

    def root(self) -> PrefixNode:
        """The empty prefix it hangs from."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


class PrefixRoot(PrefixNode):
    """The empty prefix of one salt and adapter; `num_children` counts the sequences that use it, too."""

    __slots__ = ("name", "namespace")

    def __init__(self, key: bytes, name: tuple[str, str], namespace: bytes, nowhere: array[int]):
        super().__init__(key, None, b"", nowhere)
        self.name = name
        self.namespace = namespace
        """What the name and the index's identity are told by on disk, where no object can be compared."""
        self.is_indexed = True


class PrefixIndex:
    """All nodes that have a block somewhere, or a child that has.

    Args:
        block_size: tokens of a node.
        num_groups: KV groups, each with blocks of its own.
        identity: what two engines must have in common to share blocks (on disk): model, KV dtype, rope.
        hash: of keys; tests inject a constant one.
    """

    def __init__(self, block_size: int, num_groups: int, identity: bytes = b"", hash: Hash = sha256):
        self.block_size = block_size
        self._nowhere = array("i", bytes(4 * num_groups))
        self._identity = identity
        self._hash = hash
        self._nodes: dict[bytes, PrefixNode] = {}
        self._roots: dict[tuple[str, str], PrefixRoot] = {}
        self.num_nodes = 0

    def acquire_root(self, cache_salt: str = "", adapter: str = "") -> PrefixRoot:
        """The empty prefix of one salt and adapter, kept until `release_root`."""
        name = (cache_salt, adapter)
        root = self._roots.get(name)
        if root is None:
            # Lengths first: no two pairs give the same bytes.
            parts = (self._identity, cache_salt.encode(), adapter.encode())
            named = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
            # Never by the injected hash: this is what is compared where keys are equal.
            root = self._roots[name] = PrefixRoot(self._hash(named), name, sha256(named), self._nowhere)
        root.num_children += 1
        return root

    def release_root(self, root: PrefixRoot) -> None:
        """One user of a root less."""
        root.num_children -= 1
        self.prune(root)

    def extend_keys(self, keys: list[BlockKey], root: PrefixNode, token_ids: Sequence[int], count: int) -> None:
        """Bring the keys and tokens of a sequence's full blocks up to `count`; they never change once known."""
        first, size = len(keys), 4 * self.block_size
        key = keys[-1][0] if keys else root.key
        packed = array("i", token_ids[first * self.block_size : count * self.block_size]).tobytes()
        for start in range(0, len(packed), size):
            tokens = packed[start : start + size]
            key = self._hash(key + tokens)
            keys.append((key, tokens))

    def find(self, parent: PrefixNode, key: bytes, tokens: bytes) -> PrefixNode | None:
        """The node of these tokens behind `parent`."""
        node = self._nodes.get(key)
        while node is not None and not (node.parent is parent and node.tokens == tokens):
            node = node.next_of_key
        return node

    def insert(self, parent: PrefixNode, key: bytes, tokens: bytes) -> PrefixNode:
        """A new node behind one that is indexed; `find` must have found none."""
        assert parent.is_indexed, "a node cannot hang from one that was forgotten"
        node = PrefixNode(key, parent, tokens, self._nowhere)
        node.next_of_key = self._nodes.get(key)
        self._nodes[key] = node
        node.is_indexed = True
        parent.num_children += 1
        self.num_nodes += 1
        return node

    def prune(self, node: PrefixNode) -> None:
        """Forget a node that is nowhere and has no children, and its parents where that was the last reason to keep them."""
        while node.parent is not None and node.is_indexed and node.num_children == 0 and node.is_nowhere:
            self._unlink(node)
            node.is_indexed = False
            node.parent.num_children -= 1
            self.num_nodes -= 1
            node = node.parent
        if isinstance(node, PrefixRoot) and node.num_children == 0:
            del self._roots[node.name]

    def check(self) -> None:
        """Assert that every node is reachable and has a reason to be."""
        nodes = list(self._all())
        assert len(nodes) == self.num_nodes, "a node was lost"
        children: dict[int, int] = {}
        assert len({(id(node.parent), node.tokens) for node in nodes}) == len(nodes), "two nodes stand for one prefix"
        for node in nodes:
            assert node.parent is not None and node.parent.is_indexed, "a node hangs from one that was forgotten"
            assert node.num_children or not node.is_nowhere, "a node is kept for nothing"
            children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        for node in nodes:
            assert node.num_children == children.get(id(node), 0), "a node's children are miscounted"

    def _unlink(self, node: PrefixNode) -> None:
        first = before = self._nodes[node.key]
        if first is node and node.next_of_key is None:
            del self._nodes[node.key]
        elif first is node and node.next_of_key is not None:
            self._nodes[node.key] = node.next_of_key
        else:
            while before.next_of_key is not node:
                assert before.next_of_key is not None, "a node is not where its key says"
                before = before.next_of_key
            before.next_of_key = node.next_of_key
        node.next_of_key = None

    def _all(self) -> Iterator[PrefixNode]:
        for first in self._nodes.values():
            node: PrefixNode | None = first
            while node is not None:
                yield node
                node = node.next_of_key
