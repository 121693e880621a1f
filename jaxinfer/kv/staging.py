"""Fetches: blocks on their way from host memory or disk to the device, beside the steps."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np

from jaxinfer.errors import KVCorruptionError
from jaxinfer.kv.block_programs import BlockPrograms
from jaxinfer.kv.cache import LayerKV
from jaxinfer.kv.disk import BlockLayout
from jaxinfer.messages import DiskEntry, FetchResult


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block in pinned host memory, immutable; its slot is free for another as soon as nobody refers to this one."""

    group: int
    block: LayerKV
    crc: int | None
    """Of the bytes before they left the device; None when that is not checked."""


@dataclass(slots=True)
class StagedFetch:
    """One fetch; `sources` keep what is read alive, even when its host slot is given to another block meanwhile."""

    ticket: int
    sources: Sequence[HostBlock | DiskEntry]
    blocks: dict[int, LayerKV] = field(default_factory=dict)
    """On the device, or on their way there, by the index of their source; each leaves when it is loaded."""
    reads: dict[int, Future[dict[str, np.ndarray] | None]] = field(default_factory=dict)
    failed: list[DiskEntry] = field(default_factory=list)


class Staging:
    """Outstanding fetches of one owner, in order of their call.

    Args:
        programs: of each KV group.
        read: queues the reading of a block from disk.
        max_blocks: a fetch beyond it waits until others are loaded or cancelled, unless it would be the only one.
    """

    def __init__(
        self,
        programs: Sequence[BlockPrograms],
        read: Callable[[DiskEntry, BlockLayout], Future[dict[str, np.ndarray] | None]] | None,
        max_blocks: int,
    ):
        self._programs = programs
        self._read = read
        self._max_blocks = max_blocks
        self._layouts: list[BlockLayout] = [
            {name: (shape.shape, np.dtype(shape.dtype)) for name, shape in tensors_of(one.block_shape).items()} for one in programs
        ]
        self._queued: deque[StagedFetch] = deque()
        self._running: dict[int, StagedFetch] = {}
        self._staged: dict[int, StagedFetch] = {}
        self._results: list[FetchResult] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that are on the device beside the pool, or on their way there."""
        return sum(len(fetch.blocks) + len(fetch.reads) for fetch in (*self._running.values(), *self._staged.values()))

    def add(self, ticket: int, sources: Sequence[HostBlock | DiskEntry]) -> None:
        """Begin a fetch, or queue it when too much is staged."""
        assert sources, f"fetch {ticket} has no sources"
        is_on_disk = any(isinstance(source, DiskEntry) for source in sources)
        assert self._read is not None or not is_on_disk, "a block is fetched from disk, but there is no disk tier"
        assert ticket not in self._running and ticket not in self._staged, f"fetch {ticket} exists already"
        self._queued.append(StagedFetch(ticket, sources))
        self._start_queued()

    def cancel(self, tickets: Sequence[int]) -> None:
        """Forget fetches wherever they stand; one that is not known any more has ended before and is no error."""
        cancelled = set(tickets)
        self._queued = deque(fetch for fetch in self._queued if fetch.ticket not in cancelled)
        self._results = [result for result in self._results if result.ticket not in cancelled]
        for ticket in cancelled:
            fetch = self._running.pop(ticket, None) or self._staged.pop(ticket, None)
            for future in fetch.reads.values() if fetch else ():
                future.cancel()
        self._start_queued()

    def take(self, ticket: int, index: int) -> LayerKV:
        """A staged block, which is forgotten here."""
        assert ticket in self._staged, f"fetch {ticket} is not finished, or loaded or cancelled"
        blocks = self._staged[ticket].blocks
        assert index in blocks, f"source {index} of fetch {ticket} was loaded already"
        block = blocks.pop(index)
        if not blocks:
            del self._staged[ticket]
        return block

    def finished(self) -> list[FetchResult]:
        """Fetches that ended since this was last asked.

        Raises:
            KVCorruptionError: a block's bytes are not those that were stored.
        """
        self._advance()
        results, self._results = self._results, []
        return results

    def wait(self, max_seconds: float | None = None) -> None:
        """Block until `finished` has something to tell, nothing is outstanding, or no read ended within `max_seconds`."""
        self._advance()
        while not self._results and (self._running or self._queued):
            if not self._running:
                # What is staged is not being loaded, and its owner waits for this one.
                self._start(self._queued.popleft())
            oldest = next((fetch for fetch in self._running.values() if not fetch.reads), None)
            if oldest is not None:
                jax.block_until_ready(oldest.blocks)
            else:
                reads = [future for fetch in self._running.values() for future in fetch.reads.values()]
                if not wait_for_futures(reads, max_seconds, FIRST_COMPLETED).done:
                    return
            self._advance()

    def _start_queued(self) -> None:
        while self._queued:
            num_blocks = self.num_blocks
            if num_blocks and num_blocks + len(self._queued[0].sources) > self._max_blocks:
                return
            self._start(self._queued.popleft())

    def _start(self, fetch: StagedFetch) -> None:
        self._running[fetch.ticket] = fetch
        for group, programs in enumerate(self._programs):
            chosen = [
                (index, source) for index, source in enumerate(fetch.sources) if isinstance(source, HostBlock) and source.group == group
            ]
            staged = programs.to_device([source.block for _, source in chosen])
            fetch.blocks.update(zip((index for index, _ in chosen), staged, strict=True))
        for index, source in enumerate(fetch.sources):
            if isinstance(source, DiskEntry):
                assert self._read is not None
                fetch.reads[index] = self._read(source, self._layouts[source.group])

    def _advance(self) -> None:
        """Take what became ready, and start what found no room before."""
        for fetch in list(self._running.values()):
            self._take_reads(fetch)
            if fetch.reads:
                continue
            if fetch.failed:
                self._results.append(FetchResult(fetch.ticket, tuple(fetch.failed)))
            elif all(array.is_ready() for array in jax.tree.leaves(fetch.blocks)):
                for index, source in enumerate(fetch.sources):
                    if isinstance(source, HostBlock):
                        check_crc(source, fetch.blocks[index], "on the device")
                self._results.append(FetchResult(fetch.ticket))
                self._staged[fetch.ticket] = fetch
                fetch.sources = ()  # the host's memory is not needed any more
            else:
                continue
            del self._running[fetch.ticket]
        self._start_queued()

    def _take_reads(self, fetch: StagedFetch) -> None:
        for index in [index for index, future in fetch.reads.items() if future.done()]:
            source, tensors = fetch.sources[index], fetch.reads.pop(index).result()
            assert isinstance(source, DiskEntry)
            if tensors is None:
                fetch.failed.append(source)
            else:
                block = LayerKV(**({"values": None} | tensors))
                [fetch.blocks[index]] = self._programs[source.group].to_device([block])


def block_crc(block: LayerKV) -> int:
    """CRC-32 over the bytes of all arrays of a block; waits for them."""
    crc = 0
    for array in jax.tree.leaves(block):
        crc = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), crc)
    return crc


def check_crc(source: HostBlock, block: LayerKV, where: str) -> None:
    """Compare a copy of a stored block with what was stored, if that is known.

    Raises:
        KVCorruptionError: they differ.
    """
    if source.crc is not None and (crc := block_crc(block)) != source.crc:
        raise KVCorruptionError(
            f"a KV block of group {source.group} was stored in host memory with CRC {source.crc:08x} and came back with {crc:08x} "
            f"{where}: the memory or a copy is faulty"
        )


def tensors_of(block: LayerKV) -> dict[str, Any]:
    """The arrays of a block by name, without those that its group does not have."""
    arrays = {one.name: getattr(block, one.name) for one in fields(block)}
    return {name: array for name, array in arrays.items() if array is not None}
