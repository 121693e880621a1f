"""A picture of KV memory for people: plain values. No jax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.kv.tiers import KVTiers


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroupMap:
    """The blocks of one KV group at one moment; entry i is block i + 1."""

    kind: str
    num_blocks: int
    holders: tuple[int, ...]
    """How many sequences hold each block; 0: free or cached."""
    is_cached: tuple[bool, ...]
    """Whether the block's content can be found by its prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceBlocks:
    """One unfinished sequence and its blocks (group 0)."""

    request_id: str
    index: int
    state: str
    """running, fetching, waiting, swapped."""
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVMap:
    """A read-only picture of KV memory, for people."""

    block_size: int
    groups: tuple[KVGroupMap, ...]
    sequences: tuple[SequenceBlocks, ...]
    host_slots_total: int = 0
    host_slots_cached: int = 0
    host_slots_held: int = 0


def draw_map(tiers: KVTiers, sequences: Iterable[SequenceBlocks]) -> KVMap:
    """Who holds which blocks at this moment."""
    groups = []
    for spec, pool in zip(tiers.pools.groups, tiers.pools.pools, strict=True):
        is_cached = tuple(pool.content(block_id) is not None for block_id in range(1, pool.num_blocks + 1))
        groups.append(KVGroupMap(kind=spec.kind, num_blocks=pool.num_blocks, holders=tuple(pool.ref_counts()), is_cached=is_cached))
    return KVMap(
        block_size=tiers.pools.block_size,
        groups=tuple(groups),
        sequences=tuple(sequences),
        host_slots_total=sum(pool.num_blocks for pool in tiers.host),
        host_slots_cached=sum(pool.num_cached for pool in tiers.host),
        host_slots_held=sum(pool.num_held for pool in tiers.host),
    )
