"""What an engine has done and what it holds now, as plain values."""

from __future__ import annotations

from jaxinfer.client import EngineSnapshot
from jaxinfer.metrics import EngineCounters
from jaxinfer.scheduler import Scheduler


def take_snapshot(scheduler: Scheduler, counters: EngineCounters, *, is_stepping: bool) -> EngineSnapshot:
    """Counters and gauges of this moment; reads only, so other threads may ask while a step runs."""
    tiers, pools, moved = scheduler.tiers, scheduler.pools.pools, scheduler.counters
    host = list(zip(tiers.host, tiers.limits.block_bytes, strict=True)) if tiers.host else []
    return EngineSnapshot(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_kv_blocks_total=sum(pool.num_blocks for pool in pools),
        num_kv_blocks_free=sum(pool.num_free for pool in pools),
        num_kv_blocks_cached=sum(pool.num_cached for pool in pools),
        num_kv_blocks_held=sum(pool.num_held for pool in pools),
        host_kv_bytes_total=sum(pool.num_blocks * block_bytes for pool, block_bytes in host),
        host_kv_bytes_used=sum((pool.num_held + pool.num_cached) * block_bytes for pool, block_bytes in host),
        disk_kv_bytes_total=tiers.disk.max_bytes if tiers.disk is not None else 0,
        disk_kv_bytes_used=tiers.disk.used_bytes if tiers.disk is not None else 0,
        num_preemptions=scheduler.num_preemptions,
        num_preemptions_swap=moved.num_preemptions_swap,
        num_preemptions_recompute=moved.num_preemptions_recompute,
        num_prefix_query_tokens=moved.num_prefix_query_tokens,
        num_hit_tokens_device=moved.num_hit_tokens_device,
        num_hit_tokens_host=moved.num_hit_tokens_host,
        num_hit_tokens_disk=moved.num_hit_tokens_disk,
        num_swapped_out_bytes=moved.num_swapped_out_bytes,
        num_swapped_in_bytes=moved.num_swapped_in_bytes,
        num_disk_faults=moved.num_disk_faults,
        fetch_wait_seconds=counters.fetch_wait_seconds,
        num_recompiles=counters.num_recompiles,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generation_tokens=counters.num_generation_tokens,
        num_steps=counters.num_steps,
        finished_by_reason=dict(counters.finished_by_reason),
        scheduler_seconds=counters.scheduler_seconds,
        step_seconds=counters.step_seconds,
        last_step_time=counters.last_step_time,
        is_stepping=is_stepping,
    )
