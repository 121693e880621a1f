"""The machinery of benchmarks/peers.py with a stand-in engine; the peers themselves are not needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import environment
from benchmarks.peers.measure import measure
from benchmarks.peers.report import medians, ratios
from benchmarks.peers.worker_process import WorkerFailure, WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
LOAD = {"op": "load", "model": "none.gguf", "threads": 1, "prompts": [[1, 2], [3, 4, 5]], "sequences": [1, 2], "new_tokens": 7}

STAND_IN = """
import os, sys
sys.path.insert(0, {peers!r})
from protocol import run_worker

class StandIn:
    versions = {{"stand-in": "1"}}
    settings = {{}}

    def __init__(self, load):
        self.lengths = {lengths}
        os.write(1, b"an engine that writes to stdout")
        print("so does Python")

    def generate(self, prompts, new_tokens):
        return self.lengths(prompts, new_tokens)

run_worker(StandIn)
"""


def stand_in(tmp_path: Path, lengths: str) -> WorkerProcess:
    """A worker whose engine gives `lengths(prompts, new_tokens)` tokens."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(peers=str(ROOT / "benchmarks" / "peers"), lengths=lengths))
    return WorkerProcess("stand-in", [sys.executable, str(script)], {})


def test_a_worker_answers_and_counts_tokens(tmp_path: Path) -> None:
    with stand_in(tmp_path, "lambda prompts, new_tokens: [new_tokens - 1] * len(prompts)") as worker:
        assert worker.ask(dict(LOAD))["versions"] == {"stand-in": "1"}
        answer = worker.ask({"op": "run", "sequences": 2})
    assert (answer["prompt_tokens"], answer["new_tokens"]) == (5, 12)
    assert answer["seconds"] > 0


def test_a_missing_answer_is_a_failure(tmp_path: Path) -> None:
    with stand_in(tmp_path, "lambda prompts, new_tokens: [new_tokens]") as worker:
        worker.ask(dict(LOAD))
        with pytest.raises(WorkerFailure, match=r"2 prompts gave outputs of \[7\] tokens"):
            worker.ask({"op": "run", "sequences": 2})


def test_a_worker_that_dies_says_why(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import sys\nsys.exit('no such engine')")
    with (
        WorkerProcess("dead", [sys.executable, str(script)], {}) as worker,
        pytest.raises(WorkerFailure, match=r"(?s)dead ended.*no such engine"),
    ):
        worker.ask(dict(LOAD))


class RecordedWorker:
    """Each run takes as many seconds as it is told."""

    def __init__(self, name: str, seconds: float, order: list[tuple[str, int]]):
        self.name, self._seconds, self._order = name, seconds, order

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self._order.append((self.name, question["sequences"]))
        return {"new_tokens": 10 * question["sequences"], "seconds": self._seconds}


def test_engines_take_turns_and_another_begins_each_round() -> None:
    order: list[tuple[str, int]] = []
    told: list[str] = []
    runs = measure([RecordedWorker("a", 1.0, order), RecordedWorker("b", 2.0, order)], [1, 8], 2, told.append)
    assert order == [("a", 1), ("b", 1), ("a", 8), ("b", 8), ("b", 1), ("a", 1), ("b", 8), ("a", 8)]
    assert runs == {"a": {1: [10.0, 10.0], 8: [80.0, 80.0]}, "b": {1: [5.0, 5.0], 8: [40.0, 40.0]}}
    assert len(told) == len(order)


def test_ratios_are_ours_over_theirs() -> None:
    speeds = medians(
        {
            "jaxinfer-int8": {1: [50.0, 40.0, 90.0], 8: [100.0]},
            "jaxinfer-float32": {1: [25.0], 8: [200.0]},
            "llama.cpp": {1: [100.0], 8: [50.0]},
            "transformers-float32": {1: [20.0], 8: [400.0]},
        }
    )
    found = ratios(speeds)
    assert found["best_of_ours"] == {"1": "jaxinfer-int8", "8": "jaxinfer-float32"}
    assert found["ratio_to_best_peer"] == {"1": 0.5, "8": 0.5}
    assert found["ratio_to"] == {"llama.cpp": {"1": 0.5, "8": 4.0}, "transformers-float32": {"1": 2.5, "8": 0.5}}
    assert found["ratio_of"]["jaxinfer-int8"]["llama.cpp"] == {"1": 0.5, "8": 2.0}


def fake_environment(folder: Path, pip_exit_code: int) -> None:
    """A virtual environment whose Python notes how it was called."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\nexit {pip_exit_code}\n')
    python.chmod(0o755)


def test_a_peer_that_cannot_be_installed_is_a_failure(tmp_path: Path) -> None:
    fake_environment(tmp_path, pip_exit_code=1)
    with pytest.raises(environment.EnvironmentFailure, match="OpenVINO GenAI could not be installed"):
        environment.make_environment(tmp_path, with_transformers=False)


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    fake_environment(tmp_path, pip_exit_code=0)
    assert environment.make_environment(tmp_path, with_transformers=True) == (tmp_path / "bin" / "python", True)
    assert environment.make_environment(tmp_path, with_transformers=True) == (tmp_path / "bin" / "python", True)
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "llama.cpp,nonsense"], "unknown engine nonsense"),
        (["--sequences", "0"], "whole number"),
        (["--sequences", "10000"], "there are 64 prompts"),
        (["--rounds", "-1"], "whole number"),
    ],
)
def test_a_wrong_command_line_ends_at_once(arguments: list[str], message: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    assert message in answer.stderr
