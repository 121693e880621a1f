"""How many blocks each KV group gets."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
from jax.sharding import Mesh

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.errors import ConfigError
from jaxinfer.kv.cache import bytes_per_token
from jaxinfer.kv.groups import KVGroupSpec, ceil_div

POOL_GRID = 64
"""A default pool is a multiple of this many blocks: the pool's size is part of every compiled program."""
CPU_POOL_BYTES = 2 * 2**30
HOST_SHARE = 8
"""By default the host tier takes at most this part of the memory that is free."""


def resolve_num_blocks(
    cache: CacheConfig, limits: SchedulerConfig, groups: Sequence[KVGroupSpec], max_model_len: int, mesh: Mesh
) -> list[int]:
    """Usable blocks per group: what was asked for, else what max_num_seqs sequences need within the memory budget.

    Where not all of it fits, every group gets the same share of what it wants, but no less than one sequence needs.
    """
    if cache.num_kv_blocks is not None:
        return [cache.num_kv_blocks] * len(groups)
    one_seq = [_blocks_of_one(group, limits.max_num_batched_tokens, max_model_len, cache.block_size) for group in groups]
    wanted = [limits.max_num_seqs * count for count in one_seq]
    wanted_bytes = sum(count * cache.block_size * bytes_per_token(group) for count, group in zip(wanted, groups, strict=True))
    share = min(1.0, _budget_bytes(mesh) / wanted_bytes)
    return [ceil_div(max(int(count * share), minimum), POOL_GRID) * POOL_GRID for count, minimum in zip(wanted, one_seq, strict=True)]


def _blocks_of_one(group: KVGroupSpec, max_num_batched_tokens: int, max_model_len: int, block_size: int) -> int:
    """Blocks with which one sequence of max_model_len tokens is computed in the largest steps."""
    whole = ceil_div(max_model_len, block_size)
    if group.window is None:
        return whole
    return min(whole, ceil_div(group.window + max_num_batched_tokens, block_size) + 1)


def _budget_bytes(mesh: Mesh) -> int:
    """On a CPU a tenth of the machine's memory, 2 GiB at most; on a GPU 80 % of what is free, on every device."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        return min(CPU_POOL_BYTES, psutil.virtual_memory().total // 10)
    return int((stats["bytes_limit"] - stats["bytes_in_use"]) * 0.8) * mesh.size


def resolve_host_slots(cache: CacheConfig, groups: Sequence[KVGroupSpec], num_blocks: Sequence[int]) -> tuple[int, ...]:
    """Host slots per group, each group's share that of its pool; empty: there is no host tier.

    Raises:
        ConfigError: more bytes are asked for than there are, or not enough for a block of every group.
    """
    sizes = [bytes_per_token(group) * cache.block_size for group in groups]
    pool_bytes = sum(size * count for size, count in zip(sizes, num_blocks, strict=True))
    available = psutil.virtual_memory().available
    asked = cache.host_kv_bytes
    if asked is not None and asked > available:
        raise ConfigError(f"--host-kv-bytes is {asked}, but only {available} bytes of memory are available", option="--host-kv-bytes")
    budget = min(pool_bytes, available // HOST_SHARE) if asked is None else asked
    slots = tuple(budget * count // pool_bytes for count in num_blocks)
    if all(slots):
        return slots
    if asked or cache.preemption == "swap" or cache.disk_kv_path is not None:
        least = ceil_div(pool_bytes, min(num_blocks))
        raise ConfigError(f"--host-kv-bytes must be at least {least}: a block of every KV group, got {budget}", option="--host-kv-bytes")
    return ()
