"""The simulated server: the real scheduler with pools of numbers, as an engine with these options would build it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxinfer.config import CacheConfig, PreemptionMode, SchedulerConfig
from jaxinfer.errors import ConfigError
from jaxinfer.kv.costs import CopyCosts, break_even_tokens
from jaxinfer.kv.disk_index import DiskIndex
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec, ceil_div
from jaxinfer.kv.prefix import PrefixIndex
from jaxinfer.kv.tables import GroupedPools
from jaxinfer.kv.tiers import KVTiers, TierLimits
from jaxinfer.scheduler import Scheduler
from jaxinfer.simulation.options import SimulationOptions
from jaxinfer.simulation.timing import Timing
from jaxinfer.simulation.traces import END_TOKEN

DEFAULT_MAX_MODEL_LEN = 8192
KV = KVGroupSpec(kind="full", layers=(0,), tensors=(KVTensorSpec(name="kv", num_heads=1, head_dim=1, dtype="int8"),))
"""All layers as one group; how large a token is in it, only the timing model knows."""


@dataclass(frozen=True, slots=True)
class Server:
    """A scheduler and what the simulation must know beside it.

    `room_tokens`: tokens that the pool holds in all. With static allocation a block of the scheduler's is one reservation.
    """

    scheduler: Scheduler
    tiers: KVTiers
    room_tokens: int
    block_bytes: float


def max_model_len(limits: SchedulerConfig) -> int:
    """Tokens of the longest sequence."""
    return limits.max_model_len or DEFAULT_MAX_MODEL_LEN


def num_kv_blocks(cache: CacheConfig, limits: SchedulerConfig, timing: Timing) -> int:
    """What was asked for, else what max-num-seqs sequences of max-model-len need, within the device's memory."""
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    wanted = limits.max_num_seqs * ceil_div(max_model_len(limits), cache.block_size)
    return max(1, min(wanted, int(timing.kv_memory_bytes / (timing.kv_bytes_per_token * cache.block_size))))


def build_server(cache: CacheConfig, limits: SchedulerConfig, options: SimulationOptions, timing: Timing) -> Server:
    """Make a scheduler with empty pools.

    Raises:
        ConfigError: for options that do not fit each other.
    """
    num_blocks = num_kv_blocks(cache, limits, timing)
    if options.allocation == "static":
        return _static_server(num_blocks * cache.block_size, cache, limits, options, timing)
    block_bytes = timing.kv_bytes_per_token * cache.block_size
    pools = GroupedPools([KV], [num_blocks], cache.block_size)
    index = PrefixIndex(cache.block_size, 1) if cache.prefix_caching == "on" else None
    tier_limits = _tier_limits(cache, timing, num_blocks, block_bytes)
    tiers = KVTiers(pools, index, tier_limits, _disk(cache, options, tier_limits))
    return Server(_scheduler(limits, tiers, cache.preemption), tiers, num_blocks * cache.block_size, block_bytes)


def _scheduler(limits: SchedulerConfig, tiers: KVTiers, preemption: PreemptionMode) -> Scheduler:
    return Scheduler(
        limits,
        tiers.pools,
        max_model_len=max_model_len(limits),
        max_num_logit_rows=limits.max_num_seqs,
        eos_token_ids=(END_TOKEN,),
        tiers=tiers,
        preemption=preemption,
    )


def _tier_limits(cache: CacheConfig, timing: Timing, num_blocks: int, block_bytes: float) -> TierLimits:
    num_slots = num_blocks if cache.host_kv_bytes is None else int(cache.host_kv_bytes / block_bytes)
    if num_slots == 0:
        if cache.host_kv_bytes:
            raise ConfigError(
                f"--host-kv-bytes must hold a block of {block_bytes:g} bytes, or be 0, got {cache.host_kv_bytes}", option="--host-kv-bytes"
            )
        return TierLimits()
    copy = CopyCosts(0.0, block_bytes / timing.host_link_bytes_per_second)
    seconds_per_token = timing.flops_per_token / timing.flops_per_second
    swap = break_even_tokens(copy + copy, seconds_per_token, 0.0, cache.block_size)
    return TierLimits(
        host_slots=(num_slots,),
        block_bytes=(int(block_bytes),),
        min_swap_tokens=swap,
        min_fetch_tokens=break_even_tokens(copy, seconds_per_token, 0.0, cache.block_size),
    )


def _disk(cache: CacheConfig, options: SimulationOptions, tier_limits: TierLimits) -> DiskIndex | None:
    if options.simulated_disk == "off":
        return None
    if cache.prefix_caching == "off" or not tier_limits.host_slots:
        what = "--prefix-caching off" if cache.prefix_caching == "off" else "--host-kv-bytes 0"
        raise ConfigError(f"--simulated-disk keeps cached prefixes that leave host memory, got {what}", option="--simulated-disk")
    return DiskIndex(cache.disk_kv_bytes)


def _static_server(room_tokens: int, cache: CacheConfig, limits: SchedulerConfig, options: SimulationOptions, timing: Timing) -> Server:
    """Each sequence has max_model_len tokens set aside: for the scheduler, one block of that size.

    So many sequences run as there are reservations in the room. The pool has twice as many and one more, as the scheduler
    keeps a block back for each running sequence to grow into, which none of these ever does.
    """
    reserved = max_model_len(limits)
    num_reservations = room_tokens // reserved
    if num_reservations == 0:
        raise ConfigError(
            f"--allocation static sets aside --max-model-len {reserved} tokens for a sequence, and the pool has only {room_tokens}; "
            "raise --num-kv-blocks",
            option="--allocation",
        )
    if options.simulated_disk == "on":
        raise ConfigError("--simulated-disk needs blocks to keep, got --allocation static", option="--simulated-disk")
    max_num_seqs = min(limits.max_num_seqs, num_reservations)
    pools = GroupedPools([KV], [2 * max_num_seqs + 1], reserved)
    tiers = KVTiers(pools)
    scheduler = _scheduler(replace(limits, max_num_seqs=max_num_seqs), tiers, "recompute")
    return Server(scheduler, tiers, room_tokens, timing.kv_bytes_per_token * reserved)
