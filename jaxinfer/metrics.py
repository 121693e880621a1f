"""Counters and timings as plain values."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(slots=True)
class CompileCounter:
    """Programs that XLA compiled, or loaded from the persistent cache, in this process since the counter was made.

    jax has one list of listeners per process and no public way off it, so there is one counter: `compile_counter()`.
    """

    num_programs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        """The event fires on hits of the persistent cache too: while serving neither should happen."""
        if event == _COMPILE_EVENT:
            with self._lock:
                self.num_programs += 1


_counter: list[CompileCounter] = []
_counter_lock = threading.Lock()


def compile_counter() -> CompileCounter:
    """The process's counter; listening begins with the first call."""
    with _counter_lock:
        if not _counter:
            counter = CompileCounter()
            jax.monitoring.register_event_duration_secs_listener(counter.on_duration)
            _counter.append(counter)
        return _counter[0]


@dataclass(slots=True)
class EngineCounters:
    """What one engine has done; only grows."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_recompiles: int = 0
    """Programs that were compiled while a step ran; warm-up is meant to leave none."""
    finished_by_reason: dict[str, int] = field(default_factory=dict)
    scheduler_seconds: float = 0.0
    """Planning steps and accounting for their results."""
    step_seconds: float = 0.0
    """From a step's launch, or the end of the one before, to its results."""
    fetch_wait_seconds: float = 0.0
    last_step_time: float = 0.0
