"""KV blocks between the device, pinned host memory and disk: does what the scheduler's moves and fetches say."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxinfer.kv.block_programs import BlockPrograms
from jaxinfer.kv.cache import LayerKV, bytes_per_token
from jaxinfer.kv.costs import CopyCosts, MoveCosts
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.kv.groups import KVGroupSpec
from jaxinfer.kv.staging import HostBlock, Staging, block_crc, check_crc, tensors_of
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

MAX_STAGED_BLOCKS = 64
MEASURED_BLOCKS = 16
MEASURED_TIMES = 3


class BlockMover:
    """Owns what is in the host tier's slots and what is staged; who owns which slot is the scheduler's to know.

    One thread calls it. Copies are enqueued and not waited for: a gather reads the pool before any later program writes it.

    Args:
        kv_shapes: each layer's arrays, see `kv.cache.layer_shapes`.
        disk: the third tier, closed with this; without it no move may name a DiskEntry.
        checks_crc: compare every block that comes back from host memory with what was stored. Waits for each copy: slow.
        max_staged_blocks: the most blocks beside the pool on the device, in each direction: stores beyond it wait for the
            oldest, fetches for those before them.
    """

    def __init__(
        self,
        kv_shapes: list[LayerKV],
        groups: Sequence[KVGroupSpec],
        mesh: Mesh,
        *,
        disk: DiskBlocks | None = None,
        checks_crc: bool = False,
        max_staged_blocks: int = MAX_STAGED_BLOCKS,
    ):
        assert max_staged_blocks >= 1, f"max_staged_blocks must be at least 1, got {max_staged_blocks}"
        self._groups = groups
        self._disk = disk
        self._checks_crc = checks_crc
        self._max_staged_blocks = max_staged_blocks
        self._programs = [BlockPrograms([kv_shapes[layer] for layer in group.layers], mesh, max_staged_blocks) for group in groups]
        self._host: dict[tuple[int, int], HostBlock] = {}
        self._leaving: deque[LayerKV] = deque()
        self._staging = Staging(self._programs, None if disk is None else disk.read, max_staged_blocks)

    def compile_jobs(self) -> list[Callable[[], None]]:
        """What compiles each program, before anything is moved; they may run in different threads."""
        return [job for programs in self._programs for job in programs.compile_jobs()]

    # ---- moves -----------------------------------------------------------------------------------------------------

    def run(self, kv: list[LayerKV], moves: Sequence[BlockMove]) -> list[LayerKV]:
        """Do the moves as if one by one in their order. The layers of a group that is written are donated."""
        kv = list(kv)
        for merged in _merged(moves):
            first = merged[0]
            if isinstance(first, SpillBlock):
                self._spill(first)
            elif isinstance(first, DeleteFromDisk):
                assert self._disk is not None, "a block is deleted from disk, but there is no disk tier"
                self._disk.delete(first.entry)
            else:
                self._move(kv, first.group, merged)
        return kv

    def _move(self, kv: list[LayerKV], group: int, moves: Sequence[BlockMove]) -> None:
        """Moves of one kind and group, in as few calls as there are programs for; `kv` gets what is written."""
        programs, places = self._programs[group], self._groups[group].layers
        for chunk in programs.chunks(len(moves)):
            layers = [kv[layer] for layer in places]
            if stores := [move for move in moves[chunk] if isinstance(move, StoreBlock)]:
                self._store(layers, stores)
            elif copies := [move for move in moves[chunk] if isinstance(move, CopyBlock)]:
                layers = programs.copy(layers, [copy.target for copy in copies], [copy.source for copy in copies])
            elif loads := [move for move in moves[chunk] if isinstance(move, LoadBlock)]:
                blocks = [self._staging.take(load.ticket, load.index) for load in loads]
                layers = programs.scatter(layers, [load.block_id for load in loads], blocks)
            for layer, layer_kv in zip(places, layers, strict=True):
                kv[layer] = layer_kv

    def _store(self, layers: list[LayerKV], stores: Sequence[StoreBlock]) -> None:
        while self._leaving and (is_ready(self._leaving[0]) or len(self._leaving) + len(stores) > self._max_staged_blocks):
            jax.block_until_ready(self._leaving.popleft())
        group = stores[0].group
        gathered = self._programs[group].gather(layers, [store.block_id for store in stores])
        stored = self._programs[group].to_host(gathered)
        self._leaving.extend(stored)
        for store, on_device, block in zip(stores, gathered, stored, strict=True):
            crc = block_crc(on_device) if self._checks_crc else None
            self._host[group, store.host_slot] = HostBlock(group, block, crc)

    def _spill(self, move: SpillBlock) -> None:
        assert self._disk is not None, "a block is spilled to disk, but there is no disk tier"
        source = self._host_block(move.group, move.host_slot)
        check_crc(source, source.block, "on its way to disk")
        self._disk.write(move.entry, tensors_of(source.block))

    def _host_block(self, group: int, slot: int) -> HostBlock:
        assert (group, slot) in self._host, f"nothing was stored in host slot {slot} of group {group}"
        return self._host[group, slot]

    # ---- fetches ---------------------------------------------------------------------------------------------------

    def fetch(self, fetches: Sequence[Fetch]) -> None:
        """Begin to bring blocks near the device; what a host slot holds now is what comes, whatever is stored there later."""
        for one in fetches:
            sources: list[HostBlock | DiskEntry] = [
                self._host_block(source.group, source.host_slot) if isinstance(source, HostSource) else source for source in one.sources
            ]
            self._staging.add(one.ticket, sources)

    def cancel(self, tickets: Sequence[int]) -> None:
        """Forget fetches wherever they stand; one that has failed or is loaded already is no error."""
        self._staging.cancel(tickets)

    def finished(self) -> list[FetchResult]:
        """Fetches that ended since this was last asked; never blocks.

        Raises:
            KVCorruptionError: a block's bytes are not those that were stored, only with `checks_crc`.
        """
        return self._staging.finished()

    def wait(self, max_seconds: float | None = None) -> None:
        """Block until at least one outstanding fetch has ended, for `finished` to tell, or there is none.

        With `max_seconds` not longer than that after the last block that came from disk.
        """
        self._staging.wait(max_seconds)

    def lost_entries(self) -> list[DiskEntry]:
        """Blocks that could not be written to disk since this was last asked."""
        return [] if self._disk is None else self._disk.lost_entries()

    @property
    def takes_writes(self) -> bool:
        """Whether the disk has refused nothing so far; blocks can be lost all the same when they come too fast."""
        return self._disk is not None and self._disk.takes_writes

    @property
    def host_bytes(self) -> int:
        """What the blocks in host memory take; a slot keeps its block until another is stored there."""
        return sum(array.nbytes for stored in self._host.values() for array in jax.tree.leaves(stored.block))

    def close(self) -> None:
        """Finish what is being written to disk, within a time limit, and drop the host tier."""
        if self._disk is not None:
            self._disk.close()
        self._host.clear()

    # ---- measuring -------------------------------------------------------------------------------------------------

    def measure(self, kv: list[LayerKV]) -> tuple[list[LayerKV], MoveCosts]:
        """What copies cost, by real ones of the first blocks, which keep their content; before anything else is moved.

        The costs are those of as many blocks of every group, one call each.
        """
        assert not self._host, "costs are measured before anything is stored"
        kv = jax.block_until_ready(kv)
        store, load = CopyCosts(0.0, 0.0), CopyCosts(0.0, 0.0)
        for group, programs in enumerate(self._programs):
            most = min(MEASURED_BLOCKS, programs.num_pool_blocks)  # at least 2: a usable block and the trash block
            kv, *one = self._measure_copies(kv, group, 1)
            kv, *many = self._measure_copies(kv, group, most)
            store += _line(one[0], many[0], most)
            load += _line(one[1], many[1], most)
        return kv, MoveCosts(store, load)

    def _measure_copies(self, kv: list[LayerKV], group: int, num_blocks: int) -> tuple[list[LayerKV], float, float]:
        """Seconds of storing and of loading the first blocks of a group, the best of a few times."""
        seconds = []
        for _ in range(MEASURED_TIMES):
            start = time.perf_counter()
            kv = self.run(kv, [StoreBlock(group, block_id, block_id) for block_id in range(num_blocks)])
            jax.block_until_ready([stored.block for stored in self._host.values()])
            stored_at = time.perf_counter()
            self.fetch([Fetch(0, tuple(HostSource(group, slot) for slot in range(num_blocks)))])
            self.wait()
            assert self.finished() == [FetchResult(0)]
            kv = jax.block_until_ready(self.run(kv, [LoadBlock(0, index, group, index) for index in range(num_blocks)]))
            seconds.append((stored_at - start, time.perf_counter() - stored_at))
            self._host.clear()
        return kv, min(store for store, _ in seconds), min(load for _, load in seconds)


def _line(seconds_of_one: float, seconds_of_many: float, num_blocks: int) -> CopyCosts:
    per_block = max(0.0, (seconds_of_many - seconds_of_one) / (num_blocks - 1))
    return CopyCosts(max(0.0, seconds_of_one - per_block), per_block)


def is_ready(block: LayerKV) -> bool:
    """Whether all arrays of a block are computed or copied."""
    return all(array.is_ready() for array in jax.tree.leaves(block))


def _merged(moves: Sequence[BlockMove]) -> Iterator[list[BlockMove]]:
    """Neighbours that one program can do at once with the outcome of doing them in order."""
    merged: list[BlockMove] = []
    targets: set[int] = set()
    for move in moves:
        if merged and not _may_join(move, merged[0], targets):
            yield merged
            merged, targets = [], set()
        merged.append(move)
        if isinstance(move, CopyBlock):
            targets.add(move.target)
        elif isinstance(move, LoadBlock):
            targets.add(move.block_id)
    if merged:
        yield merged


def _may_join(move: BlockMove, first: BlockMove, targets: set[int]) -> bool:
    """Whether a move may be merged with those from `first` on, which write `targets`: a program reads before it writes."""
    if isinstance(move, CopyBlock):
        return isinstance(first, CopyBlock) and move.group == first.group and not targets & {move.source, move.target}
    if isinstance(move, LoadBlock):
        return isinstance(first, LoadBlock) and move.group == first.group and move.block_id not in targets
    return isinstance(move, StoreBlock) and isinstance(first, StoreBlock) and move.group == first.group


def block_bytes(group: KVGroupSpec, block_size: int) -> int:
    """What one block of a group takes: all layers, scales included."""
    return bytes_per_token(group) * block_size
