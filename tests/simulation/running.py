"""Small simulations for the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxinfer.config import CacheConfig, SchedulerConfig
from jaxinfer.request import FinishReason
from jaxinfer.simulation.options import SimulationOptions, TraceOptions
from jaxinfer.simulation.recorder import LiveRequest, Recorder
from jaxinfer.simulation.report import Report, make_report
from jaxinfer.simulation.run import Simulation
from jaxinfer.simulation.server import build_server, max_model_len
from jaxinfer.simulation.timing import H200_LLAMA_8B, Timing
from jaxinfer.simulation.traces import Trace, TraceRequest, make_trace

ONE_SECOND = Timing(
    flops_per_token=1e-12,
    flops_per_pair=0,
    flops_per_second=1,
    weight_bytes=1e-12,
    kv_bytes_per_token=1e-12,
    memory_bytes_per_second=1,
    overhead_seconds=1,
    host_seconds=0,
    host_link_bytes_per_second=1,
    disk_bytes_per_second=1,
    kv_memory_bytes=1,
)
"""A step takes a second, whatever is in it."""


class GivenTrace:
    """A list of requests."""

    def __init__(self, requests: Sequence[TraceRequest]):
        self._requests = requests
        self.num_requests: int | None = len(requests)

    def requests(self) -> Iterator[TraceRequest]:
        return iter(self._requests)

    def next_turn(self, request: TraceRequest, end_seconds: float) -> TraceRequest | None:
        return None


class Noting(Recorder):
    """Keeps each request that ended, why, when, and with how many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[TraceRequest, FinishReason, float, int]] = []

    def ended(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        super().ended(live, reason, now)
        assert live.num_credited == (len(live.seq.token_ids) if live.seq.num_output_tokens else 0), "a user was served more or less"
        self.ends.append((live.request, reason, now, live.seq.num_output_tokens))


def simulation(trace: Trace | TraceOptions, timing: Timing = H200_LLAMA_8B, allocation: str = "paged", **options: Any) -> Simulation:
    """A simulation that is ready to run, with options of cache and scheduler by their names."""
    cache_names = {"block_size", "num_kv_blocks", "prefix_caching", "preemption", "host_kv_bytes", "disk_kv_bytes"}
    cache = CacheConfig(**{name: value for name, value in options.items() if name in cache_names})
    disk = options.pop("simulated_disk", "off")
    limits = SchedulerConfig(**{name: value for name, value in options.items() if name not in cache_names})
    if isinstance(trace, TraceOptions):
        trace = make_trace(trace, max_model_len(limits))
    made = SimulationOptions(allocation=allocation, simulated_disk=disk)  # type: ignore[arg-type]
    one = Simulation(build_server(cache, limits, made, timing), trace, timing)
    one.recorder = Noting()
    return one


def run(trace: Trace | TraceOptions, timing: Timing = H200_LLAMA_8B, **options: Any) -> Report:
    """The report of one run."""
    one = simulation(trace, timing, **options)
    one.run()
    one.scheduler.check()
    return make_report("", one, 0.0)


def changed(timing: Timing, **figures: float) -> Timing:
    return replace(timing, **figures)
