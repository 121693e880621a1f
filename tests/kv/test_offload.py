"""Blocks between device, host memory and disk, against numpy arrays that are moved one by one."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxinfer import sharding
from jaxinfer.errors import KVCorruptionError
from jaxinfer.kv import offload
from jaxinfer.kv.block_programs import BlockPrograms
from jaxinfer.kv.cache import LayerKV, layer_shapes
from jaxinfer.kv.costs import CopyCosts, MoveCosts
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.kv.offload import BlockMover, block_bytes
from jaxinfer.kv.staging import Staging
from jaxinfer.messages import (
    BlockMove,
    CopyBlock,
    DeleteFromDisk,
    DiskEntry,
    Fetch,
    FetchResult,
    HostSource,
    LoadBlock,
    SpillBlock,
    StoreBlock,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 44
"""Usable ones, enough for every size of program."""


def pair(dtype: str) -> tuple[KVTensorSpec, ...]:
    return tuple(KVTensorSpec(name=name, num_heads=2, head_dim=8, dtype=dtype) for name in ("keys", "values"))


GROUPS: dict[str, tuple[KVGroupSpec, ...]] = {
    "float32": (
        KVGroupSpec(kind="full", layers=(0, 2), tensors=pair("float32")),
        KVGroupSpec(kind="window", window=8, layers=(1,), tensors=pair("float32")),
    ),
    "bfloat16": (KVGroupSpec(kind="full", layers=(0, 1), tensors=pair("bfloat16")),),
    "int8": (KVGroupSpec(kind="full", layers=(0, 1), tensors=pair("int8")),),
    "latent": (
        KVGroupSpec(kind="latent", layers=(0, 1), tensors=(KVTensorSpec(name="keys", num_heads=1, head_dim=12, dtype="bfloat16"),)),
    ),
}
TICKETS = itertools.count(1)


@functools.cache
def shapes_of(name: str, num_devices: int) -> list[LayerKV]:
    groups = GROUPS[name]
    return layer_shapes(groups, [NUM_BLOCKS] * len(groups), BLOCK_SIZE, sharding.make_mesh(num_devices))


@functools.cache
def make_mover(name: str = "float32", num_devices: int = 1, checks_crc: bool = False, max_staged_blocks: int = 64) -> BlockMover:
    """Compiled once; tests leave nothing outstanding in it and read no slot that they did not store."""
    options = {"checks_crc": checks_crc, "max_staged_blocks": max_staged_blocks}
    mover = BlockMover(shapes_of(name, num_devices), GROUPS[name], sharding.make_mesh(num_devices), **options)
    for job in mover.compile_jobs():
        job()
    return mover


def mover_with(disk: DiskBlocks, name: str = "float32", num_devices: int = 1) -> BlockMover:
    mover = BlockMover(shapes_of(name, num_devices), GROUPS[name], sharding.make_mesh(num_devices), disk=disk)
    for job in mover.compile_jobs():
        job()
    return mover


def random_kv(name: str, num_devices: int = 1, seed: int = 0) -> tuple[list[LayerKV], list[dict[str, np.ndarray]]]:
    """The pool on the device, and as numpy arrays: any bits at all, NaN among them."""
    rng = np.random.default_rng(seed)

    def fill(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.frombuffer(rng.bytes(shape.size * shape.dtype.itemsize), shape.dtype).reshape(shape.shape)

    host = [jax.tree.map(fill, layer) for layer in shapes_of(name, num_devices)]
    device = jax.tree.map(lambda array, shape: jax.device_put(array, shape.sharding), host, shapes_of(name, num_devices))
    return device, [arrays_of(layer) for layer in host]


def arrays_of(layer: LayerKV) -> dict[str, np.ndarray]:
    # Copies: what is donated later would change under a view.
    return {
        field: np.array(getattr(layer, field))
        for field in ("keys", "values", "key_scales", "value_scales")
        if getattr(layer, field) is not None
    }


class Oracle:
    """What moves mean, one at a time, on numpy arrays."""

    def __init__(self, groups: tuple[KVGroupSpec, ...], pool: list[dict[str, np.ndarray]]):
        self.groups = groups
        self.pool = [{field: array.copy() for field, array in layer.items()} for layer in pool]
        self.host: dict[tuple[int, int], list[dict[str, np.ndarray]]] = {}
        self.fetched: dict[int, list[list[dict[str, np.ndarray]]]] = {}

    def block(self, group: int, block_id: int) -> list[dict[str, np.ndarray]]:
        layers = [self.pool[layer] for layer in self.groups[group].layers]
        return [{field: array[:, block_id].copy() for field, array in layer.items()} for layer in layers]

    def put(self, group: int, block_id: int, block: list[dict[str, np.ndarray]]) -> None:
        for layer, contents in zip(self.groups[group].layers, block, strict=True):
            for field, content in contents.items():
                self.pool[layer][field][:, block_id] = content

    def move(self, move: BlockMove) -> None:
        match move:
            case CopyBlock(group, source, target):
                self.put(group, target, self.block(group, source))
            case StoreBlock(group, block_id, slot):
                self.host[group, slot] = self.block(group, block_id)
            case LoadBlock(ticket, index, group, block_id):
                self.put(group, block_id, self.fetched[ticket][index])

    def fetch(self, fetch: Fetch) -> None:
        self.fetched[fetch.ticket] = [self.host[source.group, source.host_slot] for source in fetch.sources]


def assert_same(kv: list[LayerKV], pool: list[dict[str, np.ndarray]], but_for_trash: bool = False) -> None:
    first = 1 if but_for_trash else 0
    for layer, expected in zip(kv, pool, strict=True):
        for field, array in arrays_of(layer).items():
            assert array.dtype == expected[field].dtype
            assert array[:, first:].tobytes() == expected[field][:, first:].tobytes()


def fetch_all(mover: BlockMover, sources: list[Any]) -> int:
    ticket = next(TICKETS)
    mover.fetch([Fetch(ticket, tuple(sources))])
    mover.wait()
    assert mover.finished() == [FetchResult(ticket)]
    return ticket


def entry(number: int, group: int = 0) -> DiskEntry:
    return DiskEntry(bytes([number] * 32), group, tuple(range(number, number + 8)), b"namespace")


# ---- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_every_block_comes_back_into_any_other_place(name, num_devices):
    mover, groups = make_mover(name, num_devices), GROUPS[name]
    kv, pool = random_kv(name, num_devices)
    oracle, rng = Oracle(groups, pool), np.random.default_rng(1)
    for group, _ in enumerate(groups):
        for count in (NUM_BLOCKS, 20, 5, 1):
            stored, targets = (rng.permutation(np.arange(1, NUM_BLOCKS + 1))[:count].tolist() for _ in range(2))
            moves: list[BlockMove] = [StoreBlock(group, block_id, 100 + index) for index, block_id in enumerate(stored)]
            kv = mover.run(kv, moves)
            ticket = fetch_all(mover, [HostSource(group, 100 + index) for index in range(count)])
            loads = [LoadBlock(ticket, index, group, block_id) for index, block_id in enumerate(targets)]
            kv = mover.run(kv, loads)
            for move in moves:
                oracle.move(move)
            oracle.fetch(Fetch(ticket, tuple(HostSource(group, 100 + index) for index in range(count))))
            for load in loads:
                oracle.move(load)
    assert_same(kv, oracle.pool)
    assert any(layer["keys"].tobytes() != before["keys"].tobytes() for layer, before in zip(oracle.pool, pool, strict=True))
    for layer, shape in zip(kv, shapes_of(name, num_devices), strict=True):
        assert layer.keys.sharding == shape.keys.sharding


@pytest.mark.parametrize("num_devices", [1, 2])
def test_blocks_lie_in_pinned_memory_split_by_heads(num_devices, monkeypatch):
    kept: list[LayerKV] = []
    to_host = BlockPrograms.to_host

    def keep(self: BlockPrograms, blocks: list[LayerKV]) -> list[LayerKV]:
        kept.extend(to_host(self, blocks))
        return kept

    monkeypatch.setattr(BlockPrograms, "to_host", keep)
    make_mover("int8", num_devices).run(random_kv("int8", num_devices)[0], [StoreBlock(0, 3, 1)])
    for array in jax.tree.leaves(kept):
        assert array.sharding.memory_kind == "pinned_host"
        assert {shard.data.shape[1] for shard in array.addressable_shards} == {2 // num_devices}


OTHERS = [CopyBlock(0, block_id, block_id + 1) for block_id in (36, 38, 40, 42)]
"""Enough copies beside a pair of them for a program of several."""
MOVES = {
    "a copy is seen by the store after it": [CopyBlock(0, 1, 2), StoreBlock(0, 2, 1)],
    "a store is before the copy after it": [StoreBlock(0, 2, 1), CopyBlock(0, 1, 2)],
    "a chain of copies": [CopyBlock(0, 1, 2), CopyBlock(0, 2, 3), CopyBlock(0, 3, 4), *OTHERS],
    "a ring of copies": [CopyBlock(0, 1, 9), CopyBlock(0, 2, 1), CopyBlock(0, 9, 2), *OTHERS],
    "a target written twice": [CopyBlock(0, 1, 3), CopyBlock(0, 2, 3), *OTHERS],
    "a source overwritten": [CopyBlock(0, 1, 3), CopyBlock(0, 2, 1), *OTHERS],
    "a copy onto itself": [CopyBlock(0, 1, 1), CopyBlock(0, 2, 2), *OTHERS],
    "a slot stored twice": [StoreBlock(0, 1, 1), StoreBlock(0, 2, 1)],
    "groups in turns": [CopyBlock(0, 1, 2), CopyBlock(1, 1, 2), CopyBlock(0, 2, 3), StoreBlock(1, 2, 1), StoreBlock(0, 3, 1)],
    "neighbours of two groups": [CopyBlock(index % 2, 1 + index, 20 + index) for index in range(8)],
    "stores of two groups": [StoreBlock(index % 2, 1 + index, index) for index in range(8)],
    "many copies": [CopyBlock(0, index, 44 - index) for index in range(1, 20)],
}


@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_moves_happen_in_order(moves):
    mover = make_mover()
    kv, pool = random_kv("float32")
    oracle = Oracle(GROUPS["float32"], pool)
    kv = mover.run(kv, moves)
    for move in moves:
        oracle.move(move)
    assert_same(kv, oracle.pool)
    for (group, slot), block in oracle.host.items():
        kv = mover.run(kv, [LoadBlock(fetch_all(mover, [HostSource(group, slot)]), 0, group, 30)])
        oracle.put(group, 30, block)
    assert_same(kv, oracle.pool)


def test_a_load_is_seen_by_what_follows_and_not_by_what_precedes():
    mover = make_mover()
    kv, pool = random_kv("float32")
    oracle = Oracle(GROUPS["float32"], pool)
    moves: list[BlockMove] = [StoreBlock(0, block_id, block_id) for block_id in range(1, 7)]
    kv = mover.run(kv, moves)
    fetch = Fetch(fetch_all(mover, [HostSource(0, slot) for slot in range(1, 7)]), tuple(HostSource(0, slot) for slot in range(1, 7)))
    for move in moves:
        oracle.move(move)
    oracle.fetch(fetch)
    loads = [LoadBlock(fetch.ticket, index, 0, block_id) for index, block_id in enumerate((7, 9, 10, 11, 7, 12))]  # 7 twice
    moves = [StoreBlock(0, 7, 7), *loads, StoreBlock(0, 7, 8), CopyBlock(0, 7, 8)]
    kv = mover.run(kv, moves)
    for move in moves:
        oracle.move(move)
    assert_same(kv, oracle.pool)
    for slot in (7, 8):
        kv = mover.run(kv, [LoadBlock(fetch_all(mover, [HostSource(0, slot)]), 0, 0, 20 + slot)])
        oracle.put(0, 20 + slot, oracle.host[0, slot])
    assert_same(kv, oracle.pool)


def test_loads_of_one_fetch_go_to_their_groups():
    mover = make_mover()
    kv, pool = random_kv("float32")
    oracle, slots = Oracle(GROUPS["float32"], pool), [(0, 1), (1, 1), (1, 2), (0, 2)]
    kv = mover.run(kv, [StoreBlock(group, 10 + slot, slot) for group, slot in slots])
    ticket = fetch_all(mover, [HostSource(*slot) for slot in slots])
    kv = mover.run(kv, [LoadBlock(ticket, index, group, 20 + index) for index, (group, _) in enumerate(slots)])
    for index, (group, slot) in enumerate(slots):
        oracle.put(group, 20 + index, oracle.block(group, 10 + slot))
    assert_same(kv, oracle.pool)


BLOCK_IDS, SLOTS = st.integers(1, 6), st.integers(1, 3)
STEPS = st.one_of(
    st.builds(CopyBlock, st.integers(0, 1), BLOCK_IDS, BLOCK_IDS),
    st.builds(StoreBlock, st.integers(0, 1), BLOCK_IDS, SLOTS),
    st.tuples(st.just("load"), st.integers(0, 1), SLOTS, BLOCK_IDS),
    st.tuples(st.just("fetch"), st.lists(st.tuples(st.integers(0, 1), SLOTS), min_size=1, max_size=4), st.just(0), st.just(0)),
    st.just("run"),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@example(steps=[StoreBlock(0, 1, 1), ("fetch", [(0, 1), (0, 1)], 0, 0), StoreBlock(0, 2, 1), ("load", 0, 0, 3), CopyBlock(0, 3, 4), "run"])
@given(steps=st.lists(STEPS, max_size=40))
def test_random_moves_are_those_of_numpy(steps):
    mover = make_mover("float32", max_staged_blocks=3)
    kv, pool = random_kv("float32")
    oracle, pending, loadable, done = Oracle(GROUPS["float32"], pool), [], [], []
    for step in [*steps, "run"]:
        if step == "run":
            kv, pending = mover.run(kv, pending), []
        elif isinstance(step, (CopyBlock, StoreBlock)):
            pending.append(step)
            oracle.move(step)
        elif step[0] == "fetch":
            kv, pending = mover.run(kv, pending), []
            sources = [HostSource(*place) for place in step[1] if place in oracle.host]
            if sources:
                fetch = Fetch(next(TICKETS), tuple(sources))
                mover.fetch([fetch])
                oracle.fetch(fetch)
                loadable += [(fetch.ticket, index, source.group) for index, source in enumerate(sources)]
        elif loadable:
            load = LoadBlock(*loadable.pop(0), step[3])
            while FetchResult(load.ticket) not in done:
                mover.wait()
                results = mover.finished()
                assert results, f"fetch {load.ticket} never ended"
                done += results
            pending.append(load)
            oracle.move(load)
    assert_same(kv, oracle.pool)
    mover.cancel([ticket for ticket, *_ in loadable])
    assert mover.finished() == []


@pytest.mark.parametrize("max_staged_blocks", [1, 9])
def test_many_blocks_go_through_little_staging(max_staged_blocks):
    mover = make_mover("float32", max_staged_blocks=max_staged_blocks)
    kv, pool = random_kv("float32")
    kv = mover.run(kv, [StoreBlock(0, block_id, block_id) for block_id in range(1, NUM_BLOCKS + 1)])
    ticket = fetch_all(mover, [HostSource(0, slot) for slot in range(1, NUM_BLOCKS + 1)])
    kv = mover.run(kv, [LoadBlock(ticket, index, 0, NUM_BLOCKS - index) for index in range(NUM_BLOCKS)])
    oracle = Oracle(GROUPS["float32"], pool)
    for layer in GROUPS["float32"][0].layers:
        for array in oracle.pool[layer].values():
            array[:, 1:] = array[:, :0:-1].copy()
    assert_same(kv, oracle.pool)


def test_stores_beyond_the_bound_wait_for_the_oldest(monkeypatch):
    mover, waited = make_mover.__wrapped__(max_staged_blocks=3), []
    kv, pool = random_kv("float32")
    kv = mover.run(kv, [StoreBlock(0, 1, 1)])
    monkeypatch.setattr(offload, "is_ready", lambda block: False)
    monkeypatch.setattr(offload, "jax", SimpleNamespace(block_until_ready=waited.append))
    kv = mover.run(kv, [StoreBlock(0, 2, 2), StoreBlock(0, 3, 3)])
    assert waited == []
    mover.run(kv, [StoreBlock(0, block_id, block_id) for block_id in range(4, 9)])
    oracle = Oracle(GROUPS["float32"], pool)
    for block_id, block in enumerate(waited, start=1):
        expected = oracle.block(0, block_id)
        assert np.asarray(block.keys).tobytes() == np.stack([layer["keys"] for layer in expected]).tobytes()
    assert len(waited) == 5


# ---- fetches -----------------------------------------------------------------------------------------------------------


def test_a_fetch_keeps_what_its_slot_held():
    mover = make_mover()
    kv, pool = random_kv("float32")
    kv = mover.run(kv, [StoreBlock(0, 1, 1)])
    ticket = next(TICKETS)
    mover.fetch([Fetch(ticket, (HostSource(0, 1),))])
    kv = mover.run(kv, [StoreBlock(0, 2, 1)])
    mover.wait()
    assert mover.finished() == [FetchResult(ticket)]
    kv = mover.run(kv, [LoadBlock(ticket, 0, 0, 3), LoadBlock(fetch_all(mover, [HostSource(0, 1)]), 0, 0, 4)])
    oracle = Oracle(GROUPS["float32"], pool)
    oracle.put(0, 3, oracle.block(0, 1))
    oracle.put(0, 4, oracle.block(0, 2))
    assert_same(kv, oracle.pool)


def test_what_was_never_stored_or_fetched_is_an_invariant_broken():
    mover = make_mover()
    kv, _ = random_kv("float32")
    with pytest.raises(AssertionError, match="nothing was stored in host slot 77 of group 1"):
        mover.fetch([Fetch(next(TICKETS), (HostSource(1, 77),))])
    with pytest.raises(AssertionError, match="is not finished"):
        mover.run(kv, [LoadBlock(next(TICKETS), 0, 0, 1)])
    with pytest.raises(AssertionError, match="no such block"):
        mover.run(kv, [StoreBlock(0, NUM_BLOCKS + 1, 1)])
    with pytest.raises(AssertionError, match="there is no disk tier"):
        mover.fetch([Fetch(next(TICKETS), (entry(1),))])
    kv = mover.run(kv, [StoreBlock(0, 1, 1)])
    ticket = fetch_all(mover, [HostSource(0, 1), HostSource(0, 1)])
    kv = mover.run(kv, [LoadBlock(ticket, 0, 0, 1)])
    with pytest.raises(AssertionError, match=f"source 0 of fetch {ticket} was loaded already"):
        mover.run(kv, [LoadBlock(ticket, 0, 0, 1)])
    mover.cancel([ticket])


def test_waiting_for_nothing_returns():
    mover = make_mover()
    mover.wait()
    assert mover.finished() == []
    assert mover.lost_entries() == []


class FakeDisk:
    """Reads that end when the test says so."""

    def __init__(self) -> None:
        self.reads: dict[DiskEntry, Future[dict[str, np.ndarray] | None]] = {}
        self.is_fast = False

    def read(self, entry: DiskEntry, layout: Any) -> Future[dict[str, np.ndarray] | None]:
        self.reads[entry] = Future()
        if self.is_fast:
            self.end(entry)
        return self.reads[entry]

    def end(self, entry: DiskEntry, is_there: bool = True) -> None:
        block = {name: np.zeros((2, 2, BLOCK_SIZE, 8), np.float32) for name in ("keys", "values")}
        self.reads[entry].set_result(block if is_there else None)


@pytest.fixture
def staging() -> tuple[Staging, FakeDisk]:
    disk = FakeDisk()
    programs = [BlockPrograms([shapes_of("float32", 1)[layer] for layer in GROUPS["float32"][0].layers], sharding.make_mesh(1), 1)]
    return Staging(programs, disk.read, max_blocks=2), disk


def test_a_fetch_beyond_the_bound_begins_when_others_are_loaded(staging):
    fetches, disk = staging
    fetches.add(1, [entry(1), entry(2)])
    fetches.add(2, [entry(3)])
    assert list(disk.reads) == [entry(1), entry(2)]
    disk.end(entry(1))
    assert fetches.finished() == []
    disk.end(entry(2))
    fetches.wait()
    assert fetches.finished() == [FetchResult(1)]
    assert entry(3) not in disk.reads
    fetches.take(1, 1)
    fetches.finished()
    assert entry(3) in disk.reads
    assert fetches.num_blocks == 2


def test_a_fetch_begins_when_others_are_cancelled_or_fail(staging):
    fetches, disk = staging
    fetches.add(1, [entry(1), entry(2), entry(3)])  # too large for the bound, but alone
    fetches.add(2, [entry(4), entry(5)])
    fetches.add(3, [entry(6)])
    assert len(disk.reads) == 3
    fetches.cancel([1, 3])
    assert disk.reads[entry(1)].cancelled()
    assert list(disk.reads) == [entry(number) for number in range(1, 6)]
    fetches.add(4, [entry(7)])
    disk.end(entry(4), is_there=False)
    disk.end(entry(5), is_there=False)
    assert fetches.finished() == [FetchResult(2, (entry(4), entry(5)))]
    assert entry(7) in disk.reads and entry(6) not in disk.reads
    assert fetches.num_blocks == 1


def test_waiting_begins_what_the_bound_holds_back(staging):
    fetches, disk = staging
    disk.is_fast = True
    fetches.add(1, [entry(1), entry(2)])
    fetches.wait()
    assert fetches.finished() == [FetchResult(1)]
    fetches.add(2, [entry(3)])
    assert fetches.finished() == [] and entry(3) not in disk.reads
    fetches.wait()  # nobody loads the first, so this would last for ever
    assert fetches.finished() == [FetchResult(2)]


def test_waiting_lasts_until_a_read_ends(staging):
    fetches, disk = staging
    fetches.add(1, [entry(1)])
    fetches.add(2, [entry(2)])
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(fetches.wait)
        assert not wait_for_futures([waiting], timeout=0.05).done
        disk.end(entry(2))
        waiting.result(20)
    assert fetches.finished() == [FetchResult(2)]
    fetches.wait(max_seconds=0.001)  # the other read never ends
    assert fetches.finished() == []
    fetches.cancel([1])


@pytest.mark.parametrize("stage", ["queued", "running", "told", "loaded in part"])
def test_a_cancelled_fetch_is_forgotten(stage):
    mover = make_mover("float32", max_staged_blocks=3)
    kv, pool = random_kv("float32")
    kv = mover.run(kv, [StoreBlock(0, 1, 1), StoreBlock(0, 2, 2)])
    ticket, sources = next(TICKETS), (HostSource(0, 1), HostSource(0, 2))
    other = fetch_all(mover, list(sources)) if stage == "queued" else 0
    mover.fetch([Fetch(ticket, sources)])
    if stage in ("told", "loaded in part"):
        mover.wait()
    if stage == "loaded in part":
        assert mover.finished() == [FetchResult(ticket)]
        kv = mover.run(kv, [LoadBlock(ticket, 0, 0, 1)])
    mover.cancel([ticket, other, 10**9])
    mover.wait()
    assert mover.finished() == []
    with pytest.raises(AssertionError, match="is not finished"):
        mover.run(kv, [LoadBlock(ticket, 1, 0, 1)])
    assert_same(kv, pool)


# ---- disk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_a_block_comes_back_from_disk_after_a_restart(name, num_devices, tmp_path):
    kv, pool = random_kv(name, num_devices)
    oracle = Oracle(GROUPS[name], pool)
    last = len(GROUPS[name]) - 1
    first = mover_with(DiskBlocks(tmp_path, 2**30), name, num_devices)
    kv = first.run(
        kv, [StoreBlock(last, 3, 1), SpillBlock(last, 1, entry(1, last)), StoreBlock(last, 4, 1), SpillBlock(last, 1, entry(2, last))]
    )
    first.close()
    assert first.lost_entries() == [] and first.host_bytes == 0
    second = mover_with(DiskBlocks(tmp_path, 2**30), name, num_devices)
    kv = second.run(kv, [StoreBlock(last, 5, 1)])
    ticket = fetch_all(second, [entry(1, last), HostSource(last, 1), entry(2, last)])
    kv = second.run(kv, [LoadBlock(ticket, index, last, 10 + index) for index in range(3)])
    for index, block_id in enumerate((3, 5, 4)):
        oracle.put(last, 10 + index, oracle.block(last, block_id))
    assert_same(kv, oracle.pool)
    second.close()


def test_all_entries_that_cannot_be_read_are_named(tmp_path, caplog):
    mover = mover_with(DiskBlocks(tmp_path, 2**30))
    kv, _ = random_kv("float32")
    kv = mover.run(kv, [StoreBlock(0, 1, 1), *(SpillBlock(0, 1, entry(number)) for number in (1, 2, 3)), DeleteFromDisk(entry(2))])
    mover.fetch([Fetch(1, (entry(1), HostSource(0, 1), entry(2), entry(4))), Fetch(2, (entry(3),))])
    results: list[FetchResult] = []
    while len(results) < 2:
        mover.wait()
        results += mover.finished()
    assert sorted(results, key=lambda result: result.ticket) == [FetchResult(1, (entry(2), entry(4))), FetchResult(2)]
    with pytest.raises(AssertionError, match="fetch 1 is not finished"):
        mover.run(kv, [LoadBlock(1, 0, 0, 1)])
    mover.run(kv, [LoadBlock(2, 0, 0, 1)])
    mover.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# ---- checksums ---------------------------------------------------------------------------------------------------------


def flip(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """One bit of the last array of each block is another after the copy."""
    copy: Callable[..., list[LayerKV]] = getattr(BlockPrograms, method)

    def flipping(self: BlockPrograms, blocks: list[LayerKV]) -> list[LayerKV]:
        def flipped(block: LayerKV) -> LayerKV:
            *arrays, last = jax.tree.leaves(block)
            content = np.array(last)
            content.reshape(-1).view(np.uint8)[-1] ^= 1
            return jax.tree.unflatten(jax.tree.structure(block), [*arrays, jax.device_put(content, last.sharding)])

        return [flipped(block) for block in copy(self, blocks)]

    monkeypatch.setattr(BlockPrograms, method, flipping)


@pytest.mark.parametrize("method", ["to_host", "to_device"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_flipped_bit_is_found(method, num_devices, monkeypatch):
    mover = make_mover("int8", num_devices, checks_crc=True)
    kv, pool = random_kv("int8", num_devices)
    kv = mover.run(kv, [StoreBlock(0, 1, 1)])
    kv = mover.run(kv, [LoadBlock(fetch_all(mover, [HostSource(0, 1)]), 0, 0, 1)])
    assert_same(kv, pool)
    flip(monkeypatch, method)
    kv = mover.run(kv, [StoreBlock(0, 1, 1)])
    ticket = next(TICKETS)
    mover.fetch([Fetch(ticket, (HostSource(0, 1),))])
    with pytest.raises(KVCorruptionError, match=r"group 0 .* with CRC [0-9a-f]{8} and came back with [0-9a-f]{8} on the device"):
        mover.wait()
    mover.cancel([ticket])


def test_a_flipped_bit_does_not_reach_the_disk(monkeypatch, tmp_path):
    groups, mesh = GROUPS["float32"], sharding.make_mesh(1)
    disk = DiskBlocks(tmp_path, 2**30)
    mover = BlockMover(shapes_of("float32", 1), groups, mesh, disk=disk, checks_crc=True)
    for job in mover.compile_jobs():
        job()
    flip(monkeypatch, "to_host")
    kv = mover.run(random_kv("float32")[0], [StoreBlock(1, 1, 1)])
    with pytest.raises(KVCorruptionError, match=r"group 1 .* on its way to disk"):
        mover.run(kv, [SpillBlock(1, 1, entry(1, 1))])
    mover.close()
    assert disk.scan() == []


# ---- sizes and costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_bytes_are_those_of_the_arrays(name):
    mover, kv = BlockMover(shapes_of(name, 1), GROUPS[name], sharding.make_mesh(1)), random_kv(name)[0]
    for job in mover.compile_jobs():
        job()
    assert mover.host_bytes == 0
    for index, group in enumerate(GROUPS[name]):
        arrays = jax.tree.leaves([kv[layer] for layer in group.layers])
        assert block_bytes(group, BLOCK_SIZE) * (NUM_BLOCKS + 1) == sum(array.nbytes for array in arrays)
        before = mover.host_bytes
        kv = mover.run(kv, [StoreBlock(index, 1, 1), StoreBlock(index, 2, 2), StoreBlock(index, 3, 1)])
        assert mover.host_bytes - before == 2 * block_bytes(group, BLOCK_SIZE)


def test_measuring_changes_nothing_and_draws_a_line(monkeypatch):
    mover = make_mover.__wrapped__()
    kv, pool = random_kv("float32")
    # Of each group one block and then 16, three times each: a store and then a load, of which the fastest counts.
    one, many = [(5.0, 7.0), (1.0, 4.0), (2.0, 3.0)], [(16.0, 18.0), (17.0, 50.0), (31.0, 33.0)]
    times = [0.0]
    for store, load in (one + many) * 2:
        times += [times[-1] + store, times[-1] + store + load, times[-1] + store + load]
    clock = iter(times)
    monkeypatch.setattr(offload, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    kv, costs = mover.measure(kv)
    assert costs == MoveCosts(CopyCosts(0.0, 2.0), CopyCosts(4.0, 2.0))
    assert mover.host_bytes == 0
    assert_same(kv, pool)


def test_real_copies_cost_something():
    mover = make_mover.__wrapped__()
    _, costs = mover.measure(random_kv("float32")[0])
    for one in (costs.store, costs.load):
        assert one.fixed_seconds >= 0 and one.seconds_per_block >= 0
        assert one.seconds(1) > 0
