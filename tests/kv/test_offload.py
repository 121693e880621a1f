"""Moves within the device and to host memory, against numpy arrays that are moved one by one."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxinfer import sharding
from jaxinfer.kv import offload
from jaxinfer.kv.block_programs import BlockPrograms
from jaxinfer.kv.cache import LayerKV
from jaxinfer.kv.costs import CopyCosts, MoveCosts
from jaxinfer.kv.offload import BlockMover, block_bytes
from jaxinfer.messages import (
    BlockMove,
    CopyBlock,
    Fetch,
    FetchResult,
    HostSource,
    LoadBlock,
    StoreBlock,
)
from tests.kv.numpy_blocks import (
    BLOCK_SIZE,
    GROUPS,
    NUM_BLOCKS,
    TICKETS,
    Oracle,
    assert_same,
    fetch_all,
    make_mover,
    random_kv,
    shapes_of,
)


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
    loads = [LoadBlock(fetch.ticket, index, 0, block_id) for index, block_id in enumerate((7, 9, 7, 10, 11, 12))]  # 7 twice
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
