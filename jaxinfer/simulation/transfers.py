"""When copies of KV blocks end: the link between device and host, each way, and the disk behind it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.messages import BlockMove, CopyBlock, DiskEntry, Fetch, LoadBlock, SpillBlock, StoreBlock
from jaxinfer.simulation.timing import Timing


class Transfers:
    """Each link does one thing after the other at its bandwidth.

    Stores leave the device through staging memory that holds those of one step: the next step with stores begins when the
    last ones have left. Nothing waits for what is written to disk.

    Args:
        timing: bandwidths.
        block_bytes: bytes of one block of each KV group.
    """

    def __init__(self, timing: Timing, block_bytes: Sequence[float]):
        self._timing = timing
        self._block_bytes = tuple(block_bytes)
        self._out_free = 0.0
        self._in_free = 0.0
        self._disk_free = 0.0
        self.num_stored_bytes = 0.0
        self.num_fetched_bytes = 0.0
        self.num_spilled_bytes = 0.0

    def run_moves(self, moves: Sequence[BlockMove], start: float) -> tuple[float, float]:
        """Carry out a step's moves, at `start` or later; returns when the step begins, and the bytes copied within the device."""
        copied = stored = 0.0
        for move in moves:
            match move:
                case StoreBlock():
                    stored += self._block_bytes[move.group]
                    copied += self._block_bytes[move.group]
                case CopyBlock() | LoadBlock():
                    copied += self._block_bytes[move.group]
                case SpillBlock():
                    self.num_spilled_bytes += self._block_bytes[move.group]
        if stored:
            start = max(start, self._out_free)
            self._out_free = start + stored / self._timing.host_link_bytes_per_second
            self.num_stored_bytes += stored
        return start, copied

    def fetch(self, fetch: Fetch, now: float) -> float:
        """When a fetch that begins now is staged."""
        sizes = [self._block_bytes[source.group] for source in fetch.sources]
        from_disk = sum(size for size, source in zip(sizes, fetch.sources, strict=True) if isinstance(source, DiskEntry))
        if from_disk:
            self._disk_free = max(now, self._disk_free) + from_disk / self._timing.disk_bytes_per_second
            now = self._disk_free
        self._in_free = max(now, self._in_free) + sum(sizes) / self._timing.host_link_bytes_per_second
        self.num_fetched_bytes += sum(sizes)
        return self._in_free
