"""What benchmarks/peers.py and a worker say to each other: one JSON object per line, questions on stdin, answers on stdout.

    {"op": "load", "model": path, "threads": 2, "prompts": [[ids]], "sequences": [1, 8], "new_tokens": 128}
        -> {"versions": {...}, "settings": {...}, "load_seconds": s}        loaded and warmed up with every number of sequences
    {"op": "run", "sequences": 8} -> {"seconds": s, "prompt_tokens": n, "new_tokens": n}
    end of input: the worker leaves

A failure is {"error": text}. Standard library only: every engine's own environment imports this file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """What an engine is loaded with. Prompts are token ids: no engine's tokenizer is measured, and all get the same."""

    model: str
    threads: int
    prompts: list[list[int]]
    sequences: list[int]
    new_tokens: int

    @property
    def max_sequences(self) -> int:
        return max(self.sequences)

    @property
    def max_length(self) -> int:
        """Prompt and new tokens of the longest sequence."""
        return max(map(len, self.prompts)) + self.new_tokens


class PeerEngine(Protocol):
    """One engine, loaded."""

    versions: dict[str, str]
    settings: dict[str, Any]

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[int]:
        """Continue all prompts greedily, past end-of-sequence where the engine can; how many tokens each got."""
        ...


class PeerFactory(Protocol):
    """Loads an engine; may raise."""

    def __call__(self, load: Load) -> PeerEngine: ...


def take_stdout() -> Any:
    """The real stdout as a text file; from now on whatever else writes to stdout, C code too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def run_worker(factory: PeerFactory) -> None:
    """Answer questions until stdin ends."""
    answers = take_stdout()
    worker = _Worker(factory)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # the process's outermost edge: the parent prints it and ends
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class _Worker:
    def __init__(self, factory: PeerFactory):
        self._factory = factory

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question.pop("op") == "load":
            return self._load(Load(**question))
        return self._run(question["sequences"])

    def _load(self, load: Load) -> dict[str, Any]:
        # As many CPUs as threads: pools that are sized by the CPUs a process may use (XLA's has no other setting) then agree.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: load.threads])
        started = time.perf_counter()
        self._prompts, self._new_tokens = load.prompts, load.new_tokens
        self._engine = self._factory(load)
        for count in load.sequences:
            self._engine.generate(load.prompts[:count], min(WARM_UP_TOKENS, load.new_tokens))
        seconds = time.perf_counter() - started
        return {"versions": self._engine.versions, "settings": self._engine.settings, "load_seconds": seconds}

    def _run(self, count: int) -> dict[str, Any]:
        prompts = self._prompts[:count]
        started = time.perf_counter()
        lengths = self._engine.generate(prompts, self._new_tokens)
        seconds = time.perf_counter() - started
        if len(lengths) != count or min(lengths) == 0:
            raise RuntimeError(f"{count} prompts gave outputs of {lengths} tokens")
        return {"seconds": seconds, "prompt_tokens": sum(map(len, prompts)), "new_tokens": sum(lengths)}
