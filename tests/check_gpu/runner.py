"""Runs checks in subprocesses, two at once; a crash or a timeout is the outcome of the check that caused it, and of no other."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import batched, groupby
from pathlib import Path

from tests.check_gpu.outcome import Outcome, Task, read_lines

ROOT = Path(__file__).parents[2]
AT_ONCE = 2
BATCH = 8
"""Checks of one operation that share a subprocess: importing JAX takes as long as two of them."""

START_SECONDS = 60.0
"""What a subprocess may take beside its checks."""


def batches(tasks: Iterable[Task]) -> list[tuple[Task, ...]]:
    """What shares a subprocess: some kernels of one module. Whole programs run alone, and first, since they take longest."""
    kernels = [task for task in tasks if task.attribute == "KERNELS"]
    whole = [(task,) for task in tasks if task.attribute != "KERNELS"]
    shared = [batch for _, group in groupby(kernels, key=lambda task: task.module) for batch in batched(group, BATCH)]
    return whole + shared


def run_all(tasks: Sequence[Task], environment: Mapping[str, str], tell: Callable[[Task, Outcome], None]) -> dict[Task, Outcome]:
    """The outcome of every task; `tell` hears of each as soon as it is known."""
    outcomes: dict[Task, Outcome] = {}

    def run(batch: tuple[Task, ...]) -> None:
        for task, outcome in run_batch(batch, environment).items():
            outcomes[task] = outcome
            tell(task, outcome)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, batches(tasks)))
    return {task: outcomes[task] for task in tasks}


def run_batch(batch: tuple[Task, ...], environment: Mapping[str, str]) -> dict[Task, Outcome]:
    """Outcomes of tasks of one module. When the subprocess dies, the task that it died in is tried once more by itself."""
    ended, culprit, reason = _run_once(batch, environment)
    left = [task for task in batch if task not in ended and task != culprit]
    if culprit is not None and len(batch) == 1:
        return {culprit: Outcome(problems=(reason,))}
    if culprit is not None:
        ended |= run_batch((culprit,), environment)
    if left:
        ended |= run_batch(tuple(left), environment) if culprit is not None else dict.fromkeys(left, Outcome(problems=(reason,)))
    return {task: ended[task] for task in batch}


def _run_once(batch: tuple[Task, ...], environment: Mapping[str, str]) -> tuple[dict[Task, Outcome], Task | None, str]:
    """What ended, the task that the subprocess died in (None: none had begun, or all ended), and how it died."""
    by_key = {task.key: task for task in batch}
    first = batch[0]
    with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
        file = Path(folder) / "outcomes"
        arguments = [first.module, first.attribute, str(first.timeout_seconds), str(file), *by_key]
        # Whatever compilers leave in temporary files goes with the folder, also when they crash.
        env = {**environment, "TMPDIR": folder}
        command = [sys.executable, "-m", "tests.check_gpu.child", *arguments]
        longest = START_SECONDS + sum(task.timeout_seconds for task in batch)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=longest, check=False, errors="replace"
            )
            status, errors = done.returncode, done.stderr
        except subprocess.TimeoutExpired:
            status, errors = -signal.SIGKILL, f"Timeout ({longest:.0f} s)"
        ended, began = read_lines(file)
    culprit = by_key[began] if began is not None else None
    return {by_key[key]: outcome for key, outcome in ended.items()}, culprit, how_it_died(status, errors, first.timeout_seconds)


def how_it_died(status: int, errors: str, timeout_seconds: float) -> str:
    """One sentence about a subprocess that did not finish."""
    if "Timeout (" in errors:
        return f"took more than {timeout_seconds:g} s"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it said nothing")
    died = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"the subprocess {died}: {last[:300]}"
