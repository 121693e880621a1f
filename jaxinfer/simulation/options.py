"""What a simulation is told, as options of the command line. No numpy here, as every `--help` imports this."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxinfer.config import OnOff, option, option_name
from jaxinfer.errors import ConfigError

TraceName = Literal["sharegpt", "documents", "agents"]
Arrivals = Literal["poisson", "bursts", "at-once"]
Allocation = Literal["paged", "static"]

ONLY_FOR: dict[str, tuple[str, ...]] = {
    "arrivals": ("sharegpt", "documents", "agents"),
    "request_rate": ("sharegpt", "documents", "agents"),
    "num_users": ("sharegpt", "documents", "agents"),
    "user_skew": ("sharegpt", "documents", "agents"),
    "max_prompt_len": ("sharegpt", "documents", "agents"),
    "max_output_len": ("sharegpt", "documents", "agents"),
    "questions_per_document": ("documents",),
    "turns": ("agents",),
    "system_prompt_len": ("agents",),
    "think_seconds": ("agents",),
    "hash_block_tokens": ("a trace file",),
}
"""Which traces an option says anything about."""
LARGEST = 2**31 - 1


def _number(options: Any, name: str, low: float, high: float, *, whole: bool = True, low_open: bool = False) -> None:
    value = getattr(options, name)
    if value is None:
        return
    is_kind = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_kind or not math.isfinite(value) or not low <= value <= high or (low_open and value == low):
        kind = "an integer" if whole else "a number"
        start = f"above {low:g} and up" if low_open else f"from {low:g}"
        raise ConfigError(f"{option_name(name)} must be {kind} {start} to {high:g}, got {value!r}", option=option_name(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """What arrives. Options left out take the default of the trace.

    Raises:
        ConfigError: for a value out of its range, or an option that says nothing about this trace.
    """

    trace: TraceName = option(
        "sharegpt",
        "lengths of ShareGPT's first questions and answers; documents: long prompts, each asked about several times; "
        "agents: growing conversations behind one system prompt, the next turn after the answer and some thinking",
    )
    trace_file: Path | None = option(None, "requests from a file of JSON lines instead; its fields are in the guide to the simulator")
    num_requests: int | None = option(None, "requests; default: 1000, or all of the trace file")
    trace_seed: int = option(0, "seed of everything that is drawn")
    arrivals: Arrivals | None = option(None, "poisson; bursts: poisson in bursts with pauses between; at-once (default: poisson)")
    request_rate: float | None = option(None, "requests per second in the long run; not for at-once (default: 10)")
    burst_seconds: float | None = option(None, "length of a burst, for --arrivals bursts (default: 10)")
    pause_seconds: float | None = option(None, "length of a pause, for --arrivals bursts (default: 30)")
    num_users: int | None = option(None, "users, to each of whom a request belongs (default: 8)")
    user_skew: float | None = option(None, "user k sends in proportion to 1 / k^skew; 0: all the same (default: 1)")
    max_prompt_len: int | None = option(
        None, "tokens of the longest prompt, of the longest turn for agents (default: 1024; documents: what the context holds)"
    )
    max_output_len: int | None = option(None, "tokens of the longest answer (default: 1024; documents: 512)")
    questions_per_document: int | None = option(None, "requests that begin with the same document, for documents (default: 4)")
    turns: int | None = option(None, "requests of a conversation, for agents (default: 8)")
    system_prompt_len: int | None = option(None, "tokens that every conversation begins with, for agents (default: 1500)")
    think_seconds: float | None = option(None, "mean time between an answer and the next turn, for agents (default: 5)")
    hash_block_tokens: int | None = option(None, "tokens that one of a trace file's hash_ids stands for (default: 512)")

    def __post_init__(self) -> None:
        for name in (
            "num_requests",
            "num_users",
            "max_prompt_len",
            "max_output_len",
            "questions_per_document",
            "turns",
            "hash_block_tokens",
        ):
            _number(self, name, 1, LARGEST)
        for name in ("trace_seed", "system_prompt_len"):
            _number(self, name, 0, LARGEST)
        for name in ("request_rate", "burst_seconds"):
            _number(self, name, 0, 1e9, whole=False, low_open=True)
        for name in ("pause_seconds", "think_seconds"):
            _number(self, name, 0, 1e9, whole=False)
        _number(self, "user_skew", 0, 10, whole=False)
        self._check_applies()

    def _check_applies(self) -> None:
        """What says nothing about this trace is refused and not ignored."""
        trace = "a trace file" if self.trace_file is not None else self.trace
        for name, traces in ONLY_FOR.items():
            if getattr(self, name) is not None and trace not in traces:
                raise ConfigError(f"{option_name(name)} is for {', '.join(traces)}, got it with {trace}", option=option_name(name))
        for name in ("burst_seconds", "pause_seconds"):
            if getattr(self, name) is not None and self.arrivals != "bursts":
                raise ConfigError(f"{option_name(name)} is for --arrivals bursts", option=option_name(name))
        if self.request_rate is not None and self.arrivals == "at-once":
            raise ConfigError("--request-rate says nothing about --arrivals at-once", option="--request-rate")


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """The simulated server."""

    timing: str = option("h200-llama-8b", "how long steps take: h200-llama-8b, cpu-smollm2, or a JSON file (default: h200-llama-8b)")
    allocation: Allocation = option(
        "paged", "paged; static: max-model-len tokens of the pool set aside for every sequence, as before paging"
    )
    simulated_disk: OnOff = option("off", "a disk tier of disk-kv-bytes behind host memory")
