"""Engines taking turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Worker(Protocol):
    """What is measured; `worker_process.WorkerProcess` is one."""

    name: str

    def ask(self, question: dict[str, Any]) -> dict[str, Any]: ...


def measure(
    workers: Sequence[Worker], sequences: Sequence[int], num_rounds: int, tell: Callable[[str], None]
) -> dict[str, dict[int, list[float]]]:
    """Tokens per second of every round, by engine and number of sequences; `tell` gets a line after each run.

    Engines alternate, and each round begins with another one, so that a slow minute of the machine does not hit one engine only.
    """
    runs: dict[str, dict[int, list[float]]] = {worker.name: {n: [] for n in sequences} for worker in workers}
    for round_index in range(num_rounds):
        first = round_index % len(workers)
        for n in sequences:
            for worker in [*workers[first:], *workers[:first]]:
                done = worker.ask({"op": "run", "sequences": n})
                speed = done["new_tokens"] / done["seconds"]
                runs[worker.name][n].append(speed)
                tell(f"round {round_index + 1}/{num_rounds}  {n:>3} sequences  {worker.name:<22}{speed:8.1f} tokens/s")
    return runs
