from __future__ import annotations

from array import array

from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.prefix import PrefixNode


def node(key: bytes) -> PrefixNode:
    return PrefixNode(key, None, b"", array("i", [0, 0]))


def test_bytes_and_keys_are_counted_per_group():
    index, first = DiskIndex(100), node(b"a")
    index.add(b"a", 0, 30, first)
    index.add(b"a", 1, 20, first)
    assert (len(index), index.used_bytes, index.has_any(b"a"), index.has_any(b"b")) == (2, 50, True, False)
    index.add(b"a", 1, 25, first)  # written again
    assert (len(index), index.used_bytes) == (2, 55)
    assert index.remove(b"a", 0) is first
    assert (len(index), index.used_bytes, index.has_any(b"a")) == (1, 25, True)
    index.remove(b"a", 1)
    assert (len(index), index.used_bytes, index.has_any(b"a")) == (0, 0, False)
    assert index.remove(b"a", 1) is None


def test_room_is_made_from_the_least_recently_used_end_and_no_more_than_needed():
    index, nodes = DiskIndex(100), {key: node(key) for key in (b"a", b"b", b"c")}
    for key in nodes:
        index.add(key, 0, 30, nodes[key])
    assert index.adopt(b"a", 0, nodes[b"a"])
    assert index.make_room(10) == []
    assert index.make_room(40) == [(b"b", 0, nodes[b"b"])]
    assert index.make_room(100) == [(b"c", 0, nodes[b"c"]), (b"a", 0, nodes[b"a"])]
    assert index.used_bytes == 0


def test_what_can_never_fit_removes_nothing():
    index = DiskIndex(100)
    index.add(b"a", 0, 30, node(b"a"))
    assert index.make_room(101) is None
    assert len(index) == 1


def test_entries_of_an_earlier_process_belong_to_who_looks_them_up_first():
    index = DiskIndex(100, [(b"a", 0, 30), (b"b", 0, 30)])
    assert index.used_bytes == 60
    first, second = node(b"a"), node(b"a")
    assert index.adopt(b"a", 0, first)
    assert index.adopt(b"a", 0, first)
    assert not index.adopt(b"a", 0, second)
    assert not index.adopt(b"a", 1, first)  # no such entry
    assert index.make_room(70) == [(b"b", 0, None)]
    assert index.remove(b"a", 0) is first
    assert not index.adopt(b"a", 0, second)
