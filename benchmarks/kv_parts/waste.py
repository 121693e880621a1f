"""KV memory that holds no token: a context set aside for every sequence, against blocks on demand; the simulator's scheduler."""

from __future__ import annotations

import time
from typing import Any

from jaxinfer.benchmarking.lengths import draw_lengths
from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.simulation.options import Allocation, SimulationOptions, TraceOptions
from jaxinfer.simulation.report import Report, make_report
from jaxinfer.simulation.run import Simulation
from jaxinfer.simulation.server import build_server
from jaxinfer.simulation.timing import H200_LLAMA_8B
from jaxinfer.simulation.traces import make_trace

from .bench import BLOCK_SIZE, Bench

MAX_MODEL_LEN = 2048
NUM_BLOCKS = 4096
"""Of 16 tokens; 32 contexts of 2,048."""
WANTED_STATIC_PERCENT = 50.0
WANTED_PAGED_PERCENT = 4.0
FIGURES = ("kv_waste_percent", "kv_held_percent", "mean_running", "output_tokens_per_second", "num_steps")


def floor(bench: Bench) -> dict[str, Any]:
    """Half a block a sequence against what the lengths leave of a context, each at the mean of its life, longer lives more."""
    lengths = draw_lengths(10_000, max_prompt_len=1024, max_output_len=1024, seed=1)
    steps = sum(output for _, output in lengths)
    mean_tokens = sum(output * (prompt + output / 2) for prompt, output in lengths) / steps
    paged = (BLOCK_SIZE - 1) / 2
    return {
        "mean_tokens_of_a_running_sequence": mean_tokens,
        "static_waste_percent": 100 * (1 - mean_tokens / MAX_MODEL_LEN),
        "paged_waste_percent": 100 * paged / (mean_tokens + paged),
    }


def measure(bench: Bench) -> dict[str, Any]:
    figures: dict[str, Any] = {"requests": 200 if bench.is_small else 2000, "max_model_len": MAX_MODEL_LEN}
    allocations: tuple[Allocation, ...] = ("static", "paged")
    for allocation in allocations:
        report = simulate(allocation, figures["requests"])
        figures[allocation] = {name: report.figures[name] for name in FIGURES}
        bench.tell(f"  {allocation}: {figures[allocation]}")
    figures["throughput_ratio"] = figures["paged"]["output_tokens_per_second"] / figures["static"]["output_tokens_per_second"]
    figures["holds"] = {
        f"static wastes at least {WANTED_STATIC_PERCENT:g} %": figures["static"]["kv_waste_percent"] >= WANTED_STATIC_PERCENT,
        f"paged wastes less than {WANTED_PAGED_PERCENT:g} %": figures["paged"]["kv_waste_percent"] < WANTED_PAGED_PERCENT,
    }
    return figures


def simulate(allocation: Allocation, num_requests: int) -> Report:
    """ShareGPT's lengths, all there from the start, so that memory decides how many run."""
    limits = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=2048, max_model_len=MAX_MODEL_LEN)
    cache = CacheConfig(num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, prefix_caching="off", host_kv_bytes=0)
    trace = make_trace(TraceOptions(num_requests=num_requests, arrivals="at-once"), MAX_MODEL_LEN)
    server = build_server(cache, limits, SimulationOptions(allocation=allocation), H200_LLAMA_8B)
    started = time.perf_counter()
    simulation = Simulation(server, trace, H200_LLAMA_8B)
    simulation.run()
    return make_report(allocation, simulation, time.perf_counter() - started)
