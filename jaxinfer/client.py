"""The one way in for a server: plain values in, plain values out, so that the engine may live in another process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.config import SchedulingPolicy
from jaxinfer.request import GenerationRequest, RequestDelta, RequestId


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDescription:
    """What does not change while an engine lives."""

    model_name: str
    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_prompt_tokens: int
    """Longest prompt that leaves room for one new token in the context and in the KV pool."""
    eos_token_ids: tuple[int, ...]
    scheduling_policy: SchedulingPolicy = "priority"
    """Only with "priority" may a request have a priority other than 0."""


class EngineClient(Protocol):
    """How the server, and anything else outside the engine's thread, reaches an engine."""

    @property
    def description(self) -> EngineDescription:
        """What the engine serves and how much of it."""
        ...

    def submit(self, request: GenerationRequest) -> AsyncIterator[RequestDelta]:
        """Queue a request; iterate to its end. Closing the iterator early aborts the request.

        Raises:
            RequestError: at once, when the request can never run (too long, ids out of range, duplicate id).
            QueueFullError: at once, when as many requests wait as may.
            EngineDeadError: at once or while iterating, when the engine has stopped.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a request now; its blocks are free after the running step. Unknown ids are ignored."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges of this moment; never blocks on the running step."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSnapshot:
    """Counters and gauges of one moment, plain values. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks_total: int = 0
    num_kv_blocks_free: int = 0
    """Without content anybody could want. free + cached + held = total."""
    num_kv_blocks_cached: int = 0
    """Kept for their prefix, held by nobody; given out when free ones run out."""
    num_kv_blocks_held: int = 0
    host_kv_bytes_total: int = 0
    host_kv_bytes_used: int = 0
    disk_kv_bytes_total: int = 0
    disk_kv_bytes_used: int = 0
    num_preemptions: int = 0
    num_preemptions_swap: int = 0
    num_preemptions_recompute: int = 0
    num_prefix_query_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    num_hit_tokens_device: int = 0
    num_hit_tokens_host: int = 0
    num_hit_tokens_disk: int = 0
    num_swapped_out_bytes: int = 0
    num_swapped_in_bytes: int = 0
    num_disk_faults: int = 0
    """Blocks that could not be written to or read from disk, or were not what they should be."""
    fetch_wait_seconds: float = 0.0
    """Time in which sequences waited for blocks from host memory or disk."""
    num_recompiles: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    finished_by_reason: dict[str, int] | None = None
    scheduler_seconds: float = 0.0
    step_seconds: float = 0.0
    last_step_time: float = 0.0
    """`time.monotonic()` at the end of the last step; with `is_stepping` it tells a hung engine from an idle one."""
    is_stepping: bool = False
    fault: str | None = None
