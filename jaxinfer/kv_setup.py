"""The tiers of KV memory as an engine's configuration asks for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.config import CacheConfig
from jaxinfer.kv.costs import break_even_tokens
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.groups import KVGroupSpec
from jaxinfer.kv.offload import block_bytes
from jaxinfer.kv.prefix import PrefixIndex
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.kv.tiers import KVTiers, TierLimits
from jaxinfer.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From how many tokens on copying KV beats computing it, measured when the engine starts; None: never."""

    swap_tokens: int | None
    """Out to host memory and back, for preemption."""
    fetch_tokens: int | None
    """Back from host memory, for a cached prefix."""


def measure_break_even(runner: ModelRunner, block_size: int) -> BreakEven:
    """Time real copies of blocks and real steps; a step of no context, so that computing looks cheaper than it is."""
    assert runner.mover is not None
    costs = runner.measure_moves()
    fixed_seconds, seconds_per_token = runner.measure_prefill()
    swap = break_even_tokens(costs.store + costs.load, seconds_per_token, fixed_seconds, block_size)
    return BreakEven(swap, break_even_tokens(costs.load, seconds_per_token, fixed_seconds, block_size))


def make_tiers(
    cache: CacheConfig,
    pools: GroupedPools,
    *,
    host_slots: tuple[int, ...],
    identity: bytes,
    disk: DiskBlocks | None,
    break_even: BreakEven | None,
) -> KVTiers:
    """The accounting of all tiers; `identity` is what engines must share to share blocks on disk."""
    sizes = tuple(block_bytes(group, cache.block_size) for group in pools.groups)
    limits = TierLimits(host_slots=host_slots, block_bytes=sizes)
    if break_even is not None:
        limits = replace(limits, min_swap_tokens=break_even.swap_tokens, min_fetch_tokens=break_even.fetch_tokens)
    index = PrefixIndex(cache.block_size, len(pools.groups), identity) if cache.prefix_caching == "on" else None
    disk_index = DiskIndex(cache.disk_kv_bytes, disk.scan()) if disk is not None else None
    return KVTiers(pools, index, limits, disk_index)


def kv_identity(runner: ModelRunner, groups: Sequence[KVGroupSpec], config: Mapping[str, Any], block_size: int) -> bytes:
    """A digest of all that KV depends on: every weight, the architecture (rope is part of it), how KV is stored."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr((tuple(groups), block_size)).encode())
    digest.update(runner.weights_digest())
    return digest.digest()
