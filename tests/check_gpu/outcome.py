"""What is said between the command and its subprocesses: what to check, and what came of it. Neither imports jax."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


def home(module: str) -> str:
    """What the checks of a module are called by: the operation of a `budgets`, the name of a gate."""
    parts = module.split(".")
    return parts[-2] if parts[-1] == "budgets" else parts[-1].removeprefix("gate_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One check of one module.

    `attribute` is where the module has it: KERNELS (`key` is "<check>@<device>"), CHECKS or NIGHTLY (`key` is the key there). COPIED stands
    for the small case of one of KERNELS (`key` is the check's name), whose copied bytes are counted.
    """

    module: str
    attribute: str
    key: str
    timeout_seconds: float

    @property
    def name(self) -> str:
        """What people call it: "paged_attention.decode@h200", "steps.llama3_8b"."""
        return f"{home(self.module)}.{self.key}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a task: figures, and what is wrong (empty if nothing)."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


def append_line(file: Path, key: str, outcome: Outcome | None) -> None:
    """Note that a task begins (no outcome) or has ended."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"key": key, "outcome": None if outcome is None else asdict(outcome)}) + "\n")


def read_lines(file: Path) -> tuple[dict[str, Outcome], str | None]:
    """The outcomes by key, and the key of the task that began and did not end."""
    ended: dict[str, Outcome] = {}
    began: str | None = None
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        said = json.loads(line)
        if said["outcome"] is None:
            began = said["key"]
        else:
            outcome = said["outcome"]
            ended[said["key"]] = Outcome(figures=outcome["figures"], problems=tuple(outcome["problems"]), seconds=outcome["seconds"])
            began = None
    return ended, began
