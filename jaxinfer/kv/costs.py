"""What copies of KV blocks cost, against computing their tokens again. No jax."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Seconds of copying blocks one way: a fixed part for each call and a part for each block, all KV groups together."""

    fixed_seconds: float
    seconds_per_block: float

    def seconds(self, num_blocks: int) -> float:
        """Seconds of copying this many blocks of every group at once."""
        return self.fixed_seconds + self.seconds_per_block * num_blocks

    def __add__(self, other: CopyCosts) -> CopyCosts:
        return CopyCosts(self.fixed_seconds + other.fixed_seconds, self.seconds_per_block + other.seconds_per_block)


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """Both directions; a swap of a sequence that comes back later costs `store + load`, a hit in host memory `load`."""

    store: CopyCosts
    """From the device to host memory."""
    load: CopyCosts
    """From host memory into a block of the device, staging included."""


def break_even_tokens(copy: CopyCosts, prefill_seconds_per_token: float, prefill_fixed_seconds: float, block_size: int) -> int | None:
    """The number of tokens from which on copying their blocks is always cheaper than computing them.

    n tokens lie in ceil(n / block_size) blocks, all of which are copied whole. None when no such number exists: a block
    costs at least what its tokens cost to compute.
    """
    saved_per_block = prefill_seconds_per_token * block_size - copy.seconds_per_block
    if saved_per_block <= 0:
        return None
    # Copying is at its worst with one token in the last block. Such a copy of k blocks is not cheaper exactly when
    # k * saved_per_block <= extra_fixed + prefill_seconds_per_token * (block_size - 1).
    extra_fixed = copy.fixed_seconds - prefill_fixed_seconds
    num_blocks = math.floor((extra_fixed + prefill_seconds_per_token * (block_size - 1)) / saved_per_block)
    if num_blocks < 1:
        return 1
    return math.floor((extra_fixed + copy.seconds_per_block * num_blocks) / prefill_seconds_per_token) + 1
