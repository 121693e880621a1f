"""What a simulation has shown: plain figures, as a table for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.simulation.options import SimulationOptions, TraceOptions
from jaxinfer.simulation.recorder import SERIES, Recorder
from jaxinfer.simulation.run import OnProgress, Simulation
from jaxinfer.simulation.server import build_server, max_model_len
from jaxinfer.simulation.statistics import Histogram
from jaxinfer.simulation.timing import load_timing
from jaxinfer.simulation.traces import make_trace


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run by name, in the order in which they are shown, and the state over time for a picture.

    Percentages of the KV pool are means over simulated time while steps ran. `kv_waste_percent` is of what sequences hold,
    the others are of the pool. Hit rates are of prompt tokens that were looked up.
    """

    name: str
    figures: dict[str, Any]
    times: list[float] = field(repr=False)
    rows: list[dict[str, float]] = field(repr=False)
    """One entry per time: waiting, running, and the tokens that the pool holds: held, cached, wasted."""
    room_tokens: int = 0


def simulate(
    trace: TraceOptions,
    options: SimulationOptions,
    cache: CacheConfig,
    limits: SchedulerConfig,
    *,
    name: str = "",
    on_progress: OnProgress = lambda done, total: None,
) -> Report:
    """Run one simulation from its options.

    Raises:
        ConfigError: for options that do not fit each other, a timing or trace file that cannot be used.
    """
    timing = load_timing(options.timing)
    server = build_server(cache, limits, options, timing)
    started = time.perf_counter()
    simulation = Simulation(server, make_trace(trace, max_model_len(limits)), timing, on_progress)
    simulation.run()
    return make_report(name, simulation, time.perf_counter() - started)


def make_report(name: str, simulation: Simulation, real_seconds: float) -> Report:
    """Sum up a finished run."""
    recorder = simulation.recorder
    seconds = max(recorder.last_end_seconds, 1e-12)
    ended = {str(reason): count for reason, count in sorted(recorder.num_ended.items())}
    figures: dict[str, Any] = {
        "simulated_seconds": recorder.last_end_seconds,
        "num_ended": sum(ended.values()),
        "ended_by_reason": ended,
        "num_refused": recorder.num_refused,
        "requests_per_second": sum(ended.values()) / seconds,
        "output_tokens_per_second": recorder.num_output_tokens / seconds,
        "total_tokens_per_second": (recorder.num_prompt_tokens + recorder.num_output_tokens) / seconds,
    }
    latencies = {"ttft": recorder.first_token, "tpot": recorder.per_token, "e2e": recorder.end_to_end, "wait": recorder.wait}
    for prefix, histogram in latencies.items():
        figures |= _quantiles(prefix, histogram)
    figures |= {
        "longest_wait_seconds": recorder.wait.largest,
        "fairness_index": recorder.fairness.index,
        "num_steps": recorder.num_steps,
        "device_busy_percent": min(100.0, 100 * recorder.busy_seconds / seconds),
        "max_waiting": recorder.max_waiting,
    }
    figures |= _pool(recorder, simulation.server.room_tokens)
    figures |= _tiers(simulation)
    figures |= {"real_seconds": real_seconds, "requests_per_real_second": sum(ended.values()) / max(real_seconds, 1e-12)}
    columns = [dict(zip(SERIES, row, strict=True)) for row in recorder.series.rows]
    return Report(name, figures, recorder.series.times, columns, simulation.server.room_tokens)


def _quantiles(prefix: str, histogram: Histogram) -> dict[str, float]:
    return {f"{prefix}_p{percent}_seconds": histogram.quantile(percent / 100) for percent in (50, 90, 99)}


def _pool(recorder: Recorder, room_tokens: int) -> dict[str, float]:
    """Means over time, and what is wasted of all that was held."""
    columns = dict(zip(SERIES, zip(*recorder.series.rows, strict=True), strict=True)) if recorder.series.rows else dict.fromkeys(SERIES, ())
    seconds = columns["seconds"]
    total = max(sum(seconds), 1e-12)
    mean = {name: sum(value * weight for value, weight in zip(columns[name], seconds, strict=True)) / total for name in SERIES[1:]}
    return {
        "mean_waiting": mean["waiting"],
        "mean_running": mean["running"],
        "kv_held_percent": 100 * mean["held"] / room_tokens,
        "kv_cached_percent": 100 * mean["cached"] / room_tokens,
        "kv_waste_percent": 100 * mean["wasted"] / mean["held"] if mean["held"] else 0.0,
    }


def _tiers(simulation: Simulation) -> dict[str, float]:
    counters, recorder = simulation.scheduler.counters, simulation.recorder
    queried = max(1, counters.num_prefix_query_tokens)
    return {
        "hit_percent_device": 100 * counters.num_hit_tokens_device / queried,
        "hit_percent_host": 100 * counters.num_hit_tokens_host / queried,
        "hit_percent_disk": 100 * counters.num_hit_tokens_disk / queried,
        "num_preemptions_swap": counters.num_preemptions_swap,
        "num_preemptions_recompute": counters.num_preemptions_recompute,
        "num_recomputed_tokens": recorder.num_recomputed_tokens,
        "num_discarded_tokens": recorder.num_discarded_tokens,
        "stored_gigabytes": simulation.transfers.num_stored_bytes / 1e9,
        "fetched_gigabytes": simulation.transfers.num_fetched_bytes / 1e9,
    }


def print_reports(reports: Sequence[Report]) -> None:
    """A table with a column for each run, on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=len(reports) > 1, box=None, pad_edge=False)
    table.add_column()
    for report in reports:
        table.add_column(report.name, justify="right")
    for name, first in reports[0].figures.items():
        if not isinstance(first, Mapping):
            table.add_row(name.removesuffix("_seconds").removesuffix("_percent"), *(_show(name, one.figures[name]) for one in reports))
    Console(highlight=False, markup=False).print(table)


def _show(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith("_seconds"):
        return f"{value * 1e3:.2f} ms" if value < 1 else f"{value:,.2f} s"
    if "percent" in name:
        return f"{value:.2f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
