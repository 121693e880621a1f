from __future__ import annotations

import hashlib
import itertools

import pytest

from jaxinfer.kv.prefix import PrefixIndex, PrefixNode, PrefixRoot

TOKENS = list(range(100, 112))


def constant(content: bytes) -> bytes:
    return b"same"


def insert_all(index: PrefixIndex, root: PrefixRoot, token_ids: list[int]) -> list[PrefixNode]:
    """Nodes of all full blocks, each with a block of group 0 so that it has a reason to be."""
    keys: list = []
    index.extend_keys(keys, root, token_ids, len(token_ids) // index.block_size)
    nodes: list[PrefixNode] = []
    for key, tokens in keys:
        parent = nodes[-1] if nodes else root
        node = index.find(parent, key, tokens) or index.insert(parent, key, tokens)
        node.block_ids[0] = node.block_ids[0] or next(block_ids)
        nodes.append(node)
    index.check()
    return nodes


block_ids = itertools.count(1)


def forget(index: PrefixIndex, node: PrefixNode) -> None:
    node.block_ids[0] = 0
    index.prune(node)
    index.check()


def chain(index: PrefixIndex, root: PrefixRoot, token_ids: list[int]) -> list[PrefixNode]:
    """What can be found."""
    keys: list = []
    index.extend_keys(keys, root, token_ids, len(token_ids) // index.block_size)
    found, parent = [], root
    for key, tokens in keys:
        node = index.find(parent, key, tokens)
        if node is None:
            break
        found.append(node)
        parent = node
    return found


def test_keys_are_a_chain_of_sha256_over_all_tokens_so_far():
    index = PrefixIndex(4, 1, identity=b"model")
    root = index.acquire_root("salt", "adapter")
    named = b"".join(len(part).to_bytes(8, "little") + part for part in (b"model", b"salt", b"adapter"))
    key = hashlib.sha256(named).digest()
    assert root.key == key
    keys: list = []
    index.extend_keys(keys, root, TOKENS, 1)
    index.extend_keys(keys, root, TOKENS, 3)
    for number, (got, tokens) in enumerate(keys):
        run = b"".join(token.to_bytes(4, "little") for token in TOKENS[4 * number : 4 * number + 4])
        key = hashlib.sha256(key + run).digest()
        assert (got, tokens) == (key, run)


def test_no_two_names_of_a_root_give_the_same_key():
    keys = set()
    for identity, salt, adapter in itertools.product((b"", b"a", b"aa"), ("", "a", "aa"), ("", "a", "aa")):
        root = PrefixIndex(4, 1, identity).acquire_root(salt, adapter)
        keys.add(root.key)
        assert root.namespace not in keys or root.namespace == root.key
    assert len(keys) == 27


@pytest.mark.parametrize("options", [{}, {"hash": constant}], ids=["sha256", "constant hash"])
def test_only_equal_tokens_behind_the_same_prefix_are_found(options):
    index = PrefixIndex(4, 1, **options)
    root, other_root = index.acquire_root(), index.acquire_root("salt")
    nodes = insert_all(index, root, TOKENS)
    assert chain(index, root, TOKENS) == nodes
    assert chain(index, other_root, TOKENS) == []
    assert chain(index, root, [*TOKENS[:7], 9, *TOKENS[8:]]) == nodes[:1]
    # Equal tokens in another place are another block: the second block's as a first one.
    assert chain(index, root, TOKENS[4:]) == []
    assert [node.prefix() for node in nodes] == [tuple(TOKENS[:4]), tuple(TOKENS[:8]), tuple(TOKENS)]
    assert nodes[2].root() is root
    both = insert_all(index, other_root, TOKENS)
    assert chain(index, root, TOKENS) == nodes and chain(index, other_root, TOKENS) == both
    if options:
        assert root.key == other_root.key
    assert root.namespace != other_root.namespace  # whatever the keys are


@pytest.mark.parametrize("options", [{}, {"hash": constant}], ids=["sha256", "constant hash"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_node_that_is_nowhere_is_kept_only_for_its_children(options, order):
    index = PrefixIndex(4, 1, **options)
    root = index.acquire_root()
    nodes = insert_all(index, root, TOKENS)
    for number in order:
        forget(index, nodes[number])
        with_blocks = [other for other, node in enumerate(nodes) if node.block_ids[0]]
        assert index.num_nodes == (max(with_blocks) + 1 if with_blocks else 0)
    assert not any(node.is_indexed for node in nodes)
    with pytest.raises(AssertionError, match="forgotten"):
        index.insert(nodes[0], b"key", b"")
    assert insert_all(index, root, TOKENS)[0] is not nodes[0]


def test_of_many_nodes_with_one_key_each_can_be_forgotten():
    for first in itertools.permutations(range(3)):
        index = PrefixIndex(2, 1, hash=constant)
        root = index.acquire_root()
        nodes = [insert_all(index, root, [number, number])[0] for number in range(3)]
        for count, number in enumerate(first, 1):
            forget(index, nodes[number])
            assert {other for other in range(3) if chain(index, root, [other, other])} == set(first[count:])


def test_roots_of_salts_do_not_pile_up():
    index = PrefixIndex(4, 1)
    for number in range(100):
        root = index.acquire_root(f"salt {number}")
        assert index.acquire_root(f"salt {number}") is root
        index.release_root(root)
        index.release_root(root)
    assert not index._roots
    root = index.acquire_root("kept")
    nodes = insert_all(index, root, TOKENS)
    index.release_root(root)
    assert index.acquire_root("kept") is root  # its nodes hang from it
    index.release_root(root)
    for node in reversed(nodes):
        forget(index, node)
    assert not index._roots
    index.check()
