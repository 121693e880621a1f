"""Prometheus metrics, each server with a registry of its own. Gauges and counters are the engine's; histograms are kept here."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxinfer.client import EngineSnapshot
from jaxinfer.request import FinishReason, RequestTimings
from serving.engine_thread import EngineThread

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

_GAUGES = (
    ("jaxinfer_kv_blocks_total", "Usable KV blocks: free, cached and held", "num_kv_blocks_total"),
    ("jaxinfer_kv_blocks_free", "KV blocks without content of use", "num_kv_blocks_free"),
    ("jaxinfer_kv_blocks_cached", "KV blocks kept for their prefix, that no request holds", "num_kv_blocks_cached"),
    ("jaxinfer_kv_blocks_held", "KV blocks that requests hold", "num_kv_blocks_held"),
    ("jaxinfer_host_kv_bytes_total", "Host memory for KV blocks", "host_kv_bytes_total"),
    ("jaxinfer_host_kv_bytes_used", "Host memory that holds KV blocks", "host_kv_bytes_used"),
    ("jaxinfer_disk_kv_bytes_total", "Most bytes of KV blocks on disk", "disk_kv_bytes_total"),
    ("jaxinfer_disk_kv_bytes_used", "Bytes of KV blocks on disk", "disk_kv_bytes_used"),
    ("jaxinfer_requests_running", "Requests in the running batch", "num_running"),
    ("jaxinfer_requests_waiting", "Requests waiting to run", "num_waiting"),
)
_COUNTERS = (
    ("jaxinfer_preemptions", "Times a request lost its blocks to others", "num_preemptions"),
    ("jaxinfer_prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache", "num_prefix_query_tokens"),
    ("jaxinfer_kv_fetch_wait_seconds", "Seconds that requests waited for blocks from host memory or disk", "fetch_wait_seconds"),
    ("jaxinfer_disk_kv_faults", "KV blocks that could not be written to disk, read, or were damaged", "num_disk_faults"),
    ("jaxinfer_recompiles", "Programs compiled after warm-up", "num_recompiles"),
    ("jaxinfer_prompt_tokens", "Prompt tokens computed", "num_prompt_tokens"),
    ("jaxinfer_generation_tokens", "Tokens generated", "num_generation_tokens"),
    ("jaxinfer_steps", "Engine steps", "num_steps"),
    ("jaxinfer_scheduler_seconds", "Seconds spent in scheduling", "scheduler_seconds"),
    ("jaxinfer_step_seconds", "Seconds spent in steps", "step_seconds"),
)
_BY_LABEL = (
    (
        "jaxinfer_prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache, by where their blocks were",
        "tier",
        {"device": "num_hit_tokens_device", "host": "num_hit_tokens_host", "disk": "num_hit_tokens_disk"},
    ),
    (
        "jaxinfer_preemptions_by_kind",
        "Times a request lost its blocks to others, by what became of them",
        "kind",
        {"swap": "num_preemptions_swap", "recompute": "num_preemptions_recompute"},
    ),
    (
        "jaxinfer_swapped_bytes",
        "Bytes of KV blocks copied from the device to host memory and back",
        "direction",
        {"out": "num_swapped_out_bytes", "in": "num_swapped_in_bytes"},
    ),
)
"""Counters with one label: its values and the snapshot's fields."""


class _SnapshotCollector(Collector):
    """Reads the engine's own counters at scrape time, so that none is kept twice."""

    def __init__(self, engine: EngineThread):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        snapshot: EngineSnapshot = self._engine.snapshot()
        for name, help, attribute in _GAUGES:
            yield GaugeMetricFamily(name, help, value=getattr(snapshot, attribute))
        for name, help, attribute in _COUNTERS:
            yield CounterMetricFamily(name, help, value=getattr(snapshot, attribute))
        for name, help, label, attributes in _BY_LABEL:
            counter = CounterMetricFamily(name, help, labels=[label])
            for value, attribute in attributes.items():
                counter.add_metric([value], getattr(snapshot, attribute))
            yield counter
        yield CounterMetricFamily("jaxinfer_requests_refused", "Requests that found the queue full", value=self._engine.num_refused)
        finished = CounterMetricFamily("jaxinfer_requests_finished", "Requests ended, by reason", labels=["finish_reason"])
        for reason in FinishReason:
            finished.add_metric([reason.value], (snapshot.finished_by_reason or {}).get(reason.value, 0))
        yield finished


class ServerMetrics:
    """The registry behind /metrics."""

    def __init__(self, engine: EngineThread):
        self._registry = CollectorRegistry()
        self._registry.register(_SnapshotCollector(engine))
        self._time_to_first_token = self._histogram("jaxinfer_time_to_first_token_seconds", "Arrival to first token", SECONDS)
        self._time_per_output_token = self._histogram(
            "jaxinfer_time_per_output_token_seconds", "Mean time between a completion's tokens after the first", SECONDS
        )
        self._end_to_end = self._histogram("jaxinfer_e2e_request_latency_seconds", "Arrival to last token", SECONDS)
        self._queue_time = self._histogram("jaxinfer_request_queue_time_seconds", "Arrival to first step", SECONDS)
        self._prompt_tokens = self._histogram("jaxinfer_request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._generation_tokens = self._histogram("jaxinfer_request_generation_tokens", "Tokens generated for a request", TOKENS)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, registry=self._registry, buckets=buckets)

    def observe_finished(self, timings: RequestTimings, num_prompt_tokens: int, num_tokens: int, longest: int) -> None:
        """Count a request that ran to its end; `longest` is the number of tokens of its longest completion."""
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(num_tokens)
        first, whole = timings.time_to_first_token_seconds, timings.end_to_end_seconds
        if timings.queue_seconds is not None:
            self._queue_time.observe(timings.queue_seconds)
        if first is not None:
            self._time_to_first_token.observe(first)
        if whole is not None:
            self._end_to_end.observe(whole)
        if first is not None and whole is not None and longest > 1:
            self._time_per_output_token.observe((whole - first) / (longest - 1))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
