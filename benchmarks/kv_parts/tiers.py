"""A 1,500-token prompt from nowhere, from the device, from host memory, and from disk after a restart."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer import LLM

from .bench import (
    BLOCK_SIZE,
    KV_BYTES_PER_TOKEN,
    LAYER_WEIGHTS,
    LEAST,
    SMALL_POOL,
    Bench,
    drop_page_cache,
    evict,
    greedy,
    median,
    text_ids,
)

PROMPT_TOKENS = 1500
NUM_PROMPTS = 3


def floor(bench: Bench) -> dict[str, Any]:
    """What is fetched is copied twice (host memory to staging to pool); from disk it is read before that."""
    machine = bench.machine
    found = (PROMPT_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    device = LAYER_WEIGHTS / machine.copy_bytes_per_second + machine.prefill_seconds(PROMPT_TOKENS - found, found)
    host = device + machine.copy_seconds(found, 2)
    disk = host + found * KV_BYTES_PER_TOKEN / machine.disk_read_bytes_per_second
    return {
        "bytes": found * KV_BYTES_PER_TOKEN,
        "cold": machine.prefill_seconds(PROMPT_TOKENS),
        "device": device,
        "host": host,
        "disk": disk,
    }


def measure(bench: Bench) -> dict[str, Any]:
    count = 1 if bench.is_small else NUM_PROMPTS
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=bench.scratch) as folder:
        disk = {"prefix_caching": "on", "disk_kv_path": Path(folder), "disk_kv_bytes": 2**30}
        llm, stated = start(bench, **disk)
        ids = text_ids(llm, count * PROMPT_TOKENS)
        prompts = [ids[index * PROMPT_TOKENS : (index + 1) * PROMPT_TOKENS] for index in range(count)]
        seconds["cold"] = first_tokens(llm, prompts, None)
        # What is found for the first time is copied to disk meanwhile, which the second time is not.
        seconds["device_and_to_disk"] = first_tokens(llm, prompts, "device")
        seconds["device"] = first_tokens(llm, prompts, "device")
        evict(llm)
        seconds["host"] = first_tokens(llm, prompts, "host")
        llm.close()
        for name in ("disk", "disk_in_page_cache"):
            if name == "disk":
                drop_page_cache(Path(folder))
            llm, _ = start(bench, **disk)
            seconds[name] = first_tokens(llm, prompts, "disk")
            llm.close()
    medians = {name: median(values) for name, values in seconds.items()}
    bench.tell(f"  {medians}")
    floors = floor(bench)
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "ttft_seconds": medians,
        "all_ttft_seconds": seconds,
        "times_faster_than_cold": {name: medians["cold"] / value for name, value in medians.items()},
        "stated_min_fetch_tokens": stated,
        "holds": {
            "device before host before disk before cold": medians["device"] < medians["host"] < medians["disk"] < medians["cold"],
            "the engine would fetch this prompt": stated is not None and stated <= PROMPT_TOKENS,
            "nothing is faster than its floor": all(medians[name] >= LEAST * floors[name] for name in ("cold", "device", "host", "disk")),
        },
    }


def start(bench: Bench, **options: Any) -> tuple[LLM, int | None]:
    """An engine that fetches whatever is there, and from which length on it would have."""
    llm = bench.start(SMALL_POOL, **options)
    tiers = llm.engine.scheduler.tiers
    stated = tiers.limits.min_fetch_tokens
    tiers.limits = replace(tiers.limits, min_fetch_tokens=0)
    return llm, stated


def first_tokens(llm: LLM, prompts: list[list[int]], tier: str | None) -> list[float]:
    """Seconds to the first token of each, one after the other; all that can be found must come from `tier`."""
    counters = llm.engine.scheduler.counters
    seconds = []
    for prompt in prompts:
        before = {name: getattr(counters, f"num_hit_tokens_{name}") for name in ("device", "host", "disk")}
        (output,) = greedy(llm, [prompt], 1)
        hits = {name: getattr(counters, f"num_hit_tokens_{name}") - value for name, value in before.items()}
        expected = {name: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE if name == tier else 0 for name in hits}
        assert hits == expected, f"expected hits of {expected}, got {hits}"
        seconds.append(output.timings.time_to_first_token_seconds)
    return seconds
