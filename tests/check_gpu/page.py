"""The tables of docs/kernels.md, made from the newest result of `python -m tests.check_gpu --write-docs`, which writes both."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from tests.check_gpu.discover import CONTROL, COPIED, Found, kernel_name
from tests.check_gpu.outcome import Outcome, Task

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kernels.md"
START = "<!-- From here on made by `python -m tests.check_gpu --write-docs`. -->\n"
RESULTS = ROOT / "benchmarks" / "results"
SUFFIX = "-check-gpu.json"
SHOWN = "h200"
"""The device whose figures the table shows; of a kernel that is not compiled for it, those of its first."""

HEAD = ("Kernel", "Registers", "Shared memory, KiB", "Instructions", "Bytes moved / floor", "Floor on H200, µs")


def write(found: Found, outcomes: Mapping[Task, Outcome], plugin: str) -> None:
    """Store the figures and bring the page after them."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    written = json.dumps(result(found, outcomes, plugin, date), indent=1) + "\n"
    (RESULTS / f"{date}{SUFFIX}").write_text(written, encoding="utf-8")
    write_page(json.loads(written))


def write_page(stored: Mapping[str, Any]) -> None:
    """Put the tables of a result into the page.

    Raises:
        ValueError: the page has lost the line that they stand under.
    """
    head, start, _ = PAGE.read_text(encoding="utf-8").partition(START)
    if not start:
        raise ValueError(f"{PAGE} has no line {START!r}")
    PAGE.write_text(f"{head}{START}\n{render(stored)}", encoding="utf-8")


def newest() -> dict[str, Any]:
    """The newest result."""
    return json.loads(max(RESULTS.glob(f"*{SUFFIX}")).read_text(encoding="utf-8"))


def result(found: Found, outcomes: Mapping[Task, Outcome], plugin: str, date: str) -> dict[str, Any]:
    """What is stored: figures of each kernel by device, of the small cases whose copies were counted, and of whole programs."""
    kernels: dict[str, dict[str, Any]] = {name: {} for name in found.kernels}
    for task, outcome in outcomes.items():
        if task.attribute == "KERNELS" and task.module != CONTROL:
            kernels[kernel_name(task)][task.key.partition("@")[2]] = outcome.figures
    return {
        "date": date,
        "plugin": plugin,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "kernels": kernels,
        "copied": {task.name: outcome.figures for task, outcome in outcomes.items() if task.attribute == COPIED},
        "programs": {task.name: outcome.figures for task, outcome in outcomes.items() if task.attribute in ("CHECKS", "NIGHTLY")},
    }


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def main_instructions(instructions: Mapping[str, int]) -> str:
    """Matrix products and copies; bulk copies of all dimensions are counted together."""
    counted: dict[str, int] = {}
    for name, count in instructions.items():
        words = name.split(".")
        if words[:2] == ["cp", "async"] and words[-1] in ("load", "store"):
            tensor = "tensor." if "tensor" in words else ""
            name = f"cp.async.bulk.{tensor}{words[-1]}"
        elif not (words[0] in ("wgmma", "mma") or name in ("cp.async.ca", "cp.async.cg")):
            continue
        counted[name] = counted.get(name, 0) + count
    return "<br>".join(f"{count} `{name}`" for name, count in sorted(counted.items()))


def kernel_row(name: str, by_device: Mapping[str, Any], copied: Mapping[str, Any] | None) -> list[str]:
    """One line; several kernels of one check stand below each other."""
    device = SHOWN if SHOWN in by_device else next(iter(by_device))
    figures = by_device[device]
    own = [kernel for kernel in figures["kernels"] if kernel["compiler"] == figures["subject"]]
    moved = "" if copied is None else f"{copied['bytes'] / copied['floor_bytes']:.3f}"
    return [
        f"`{name}`" if device == SHOWN else f"`{name}` ({device.upper()})",
        "<br>".join(str(kernel["registers"]) for kernel in own),
        "<br>".join(f"{kernel['shared_bytes'] / 1024:.1f}" for kernel in own),
        "<br>".join(filter(None, (main_instructions(kernel["instructions"]) for kernel in own))),
        moved,
        microseconds(figures["floor_seconds"]) if device == SHOWN else "",
    ]


def microseconds(seconds: float) -> str:
    """Three digits, or all before the point."""
    return f"{1e6 * seconds:,.0f}" if seconds >= 1e-4 else f"{1e6 * seconds:.3g}"


def said(figures: Any) -> str:
    """Figures of a whole program in words."""
    if isinstance(figures, Mapping):
        return ", ".join(
            f"{key.replace('_', ' ')} {f'({said(value)})' if isinstance(value, Mapping) else said(value)}" for key, value in figures.items()
        )
    return f"{figures:,}" if isinstance(figures, int | float) else str(figures)


def render(stored: Mapping[str, Any]) -> str:
    """Everything below the marker."""
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    parts = [f"Compiled on {stored['date']} with {versions} and the {stored['plugin']} plugin."]
    operations: dict[str, list[list[str]]] = {}
    for name, by_device in stored["kernels"].items():
        operation, _, check = name.partition(".")
        operations.setdefault(operation, []).append(kernel_row(check, by_device, stored["copied"].get(name)))
    parts += [f"### {operation}\n\n{table(HEAD, rows)}" for operation, rows in operations.items()]
    if stored["programs"]:
        rows = [(f"`{name}`", said(figures)) for name, figures in stored["programs"].items()]
        parts.append(f"### Whole programs\n\n{table(('Program', 'What it compiles to'), rows)}")
    return "\n\n".join(parts) + "\n"
