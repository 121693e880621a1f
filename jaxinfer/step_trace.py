"""When the host planned, launched and landed each step, for a timeline. No jax."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HOST, _DEVICE = 1, 2


@dataclass(slots=True)
class StepTimes:
    """The moments of one step, in seconds of the engine's clock."""

    number: int
    num_rows: int = 0
    num_tokens: int = 0
    schedule_begin: float = 0.0
    schedule_end: float = 0.0
    launch_begin: float = 0.0
    launch_end: float = 0.0
    was_ahead: bool | None = None
    """Whether the step before still ran when this one was enqueued; None: nothing was in flight, or nobody recorded."""
    ready: float = 0.0
    """When the host had the results."""
    update_end: float = 0.0
    """When they were accounted for and turned into text."""


@dataclass(slots=True)
class StepTrace:
    """Collects the times of steps; put one into `Engine.trace` to record, None to stop."""

    steps: list[StepTimes] = field(default_factory=list)

    @property
    def share_ahead(self) -> float:
        """Of the steps that were launched while another was in flight: the share whose predecessor still ran. NaN: none."""
        known = [step.was_ahead for step in self.steps if step.was_ahead is not None]
        return sum(known) / len(known) if known else float("nan")

    def chrome_events(self) -> list[dict[str, Any]]:
        """The steps as complete events of the Trace Event Format, microseconds: a row of the host's work, one of the device's.

        The device's is an upper bound, from the launch or the end of the step before to the moment when the host had the results.
        """
        events = [_thread_name(_HOST, "host"), _thread_name(_DEVICE, "device (as seen by the host)")]
        last_ready = 0.0
        for step in sorted(self.steps, key=lambda step: step.ready):
            spans = (
                ("schedule", _HOST, step.schedule_begin, step.schedule_end),
                ("launch", _HOST, step.launch_begin, step.launch_end),
                ("update", _HOST, step.ready, step.update_end),
                ("step", _DEVICE, max(step.launch_begin, last_ready), step.ready),
            )
            arguments = {"rows": step.num_rows, "tokens": step.num_tokens, "was_ahead": step.was_ahead}
            events += [_span(f"{name} {step.number}", thread, begin, end, arguments) for name, thread, begin, end in spans]
            last_ready = step.ready
        return events

    def save(self, path: Path) -> None:
        """Write a file for chrome://tracing or ui.perfetto.dev."""
        path.write_text(json.dumps({"traceEvents": self.chrome_events(), "displayTimeUnit": "ms"}))


def _thread_name(thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": name}}


def _span(name: str, thread: int, begin: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 1, "tid": thread, "ts": begin * 1e6, "dur": max(0.0, end - begin) * 1e6, "args": arguments}
