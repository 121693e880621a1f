"""Fetches: what they bring, when they begin and end."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from typing import Any

import numpy as np
import pytest

from jaxinfer import sharding
from jaxinfer.kv.block_programs import BlockPrograms
from jaxinfer.kv.staging import Staging
from jaxinfer.messages import (
    DiskEntry,
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
    entry,
    fetch_all,
    make_mover,
    random_kv,
    shapes_of,
)


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
