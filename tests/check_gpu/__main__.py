"""`python -m tests.check_gpu [--plugin cuda13|cuda12] [--device h200] [--nightly] [--write-docs] [NAME...]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pallas_kernels.deviceless.devices import DEVICES
from pallas_kernels.deviceless.toolchain import PLUGINS, environment
from tests.check_gpu import control
from tests.check_gpu.discover import CONTROL, Found, discover, is_named, kernel_name
from tests.check_gpu.outcome import Outcome, Task
from tests.check_gpu.runner import ROOT, run_all


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.check_gpu", description="Check what GPU code compiles to, without a GPU.")
    parser.add_argument("names", metavar="NAME", nargs="*", help="operations, modules, checks or patterns of them (default: everything)")
    parser.add_argument("--plugin", choices=PLUGINS, default="cuda13", help="JAX's CUDA plugin to compile with (default: cuda13)")
    parser.add_argument("--device", choices=DEVICES, action="append", default=[], help="compile kernels for this device only; repeatable")
    parser.add_argument("--nightly", action="store_true", help="also what takes too long for every change")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the figures to benchmarks/results and the table of docs/kernels.md"
    )
    given = parser.parse_args(arguments)
    if given.write_docs and (given.names or given.device):
        parser.error("--write-docs writes the whole table, so it takes no NAME and no --device")
    return given


def tell(task: Task, outcome: Outcome) -> None:
    """One line per check as it ends; what is wrong stands below it."""
    first = f"{'FAILED' if outcome.problems else 'ok':6s}  {outcome.seconds:6.1f} s  {task.name}"
    print("\n        ".join([first, *outcome.problems]), flush=True)


def judged(task: Task, outcome: Outcome) -> Outcome:
    """What an outcome means: of a control, that its flaw was found."""
    return control.judge(task.key.partition("@")[0], outcome) if task.module == CONTROL else outcome


def count_passed(found: Found, outcomes: Mapping[Task, Outcome]) -> int:
    """Kernels that met their budgets on every device that they were compiled for."""
    tried = {kernel_name(task) for task in outcomes if kernel_name(task) in found.kernels and task.attribute == "KERNELS"}
    return len(tried - {kernel_name(task) for task, outcome in outcomes.items() if outcome.problems})


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    folder = ROOT / ".gpu-toolchain" / given.plugin
    if not (folder / "stamp").exists():
        print(
            f"check_gpu: error: {folder.relative_to(ROOT)} is not complete; run: scripts/gpu_toolchain.sh {given.plugin}", file=sys.stderr
        )
        return 2
    found = discover(devices=given.device, nightly=given.nightly, copied=given.write_docs)
    tasks = [task for task in found.tasks if is_named(task.name, given.names)]
    failures = {name: outcome for name, outcome in found.failures.items() if is_named(name, given.names)}
    if not tasks and not failures:
        print(f"check_gpu: error: nothing is called {' or '.join(given.names)}", file=sys.stderr)
        return 2
    # The controls run every time: a checker that finds nothing would pass everything.
    tasks += [task for task in found.tasks if task.module == CONTROL and task not in tasks]
    for name, outcome in failures.items():
        print(f"FAILED  {name}\n        {'; '.join(outcome.problems)}")
    raw = run_all(tasks, environment(Path(folder), os.environ), lambda task, outcome: tell(task, judged(task, outcome)))
    outcomes = {task: judged(task, outcome) for task, outcome in raw.items()}
    failed = sum(bool(outcome.problems) for outcome in outcomes.values()) + len(failures)
    if given.write_docs and not failed:
        from tests.check_gpu.page import write

        write(found, outcomes, given.plugin)
    if failed:
        print(f"{failed} of {len(outcomes) + len(failures)} checks failed")
    print(f"{count_passed(found, outcomes)} kernels compiled")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
