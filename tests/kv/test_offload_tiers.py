"""Blocks that go to disk and come back, and the checksums of those in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxinfer import sharding
from jaxinfer.errors import KVCorruptionError
from jaxinfer.kv.block_programs import BlockPrograms
from jaxinfer.kv.cache import LayerKV
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.kv.offload import BlockMover
from jaxinfer.messages import (
    DeleteFromDisk,
    Fetch,
    FetchResult,
    HostSource,
    LoadBlock,
    SpillBlock,
    StoreBlock,
)
from tests.kv.numpy_blocks import (
    GROUPS,
    TICKETS,
    Oracle,
    assert_same,
    entry,
    fetch_all,
    make_mover,
    mover_with,
    random_kv,
    shapes_of,
)


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
