"""What there is to check: budgets of operations, gates of this package, and the controls of the checker."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pallas_kernels
from pallas_kernels.common.budget import KernelCheck
from tests.check_gpu import control
from tests.check_gpu.outcome import Outcome, Task, home

KERNELS = Path(pallas_kernels.__file__).parent
GATES = Path(__file__).parent
KERNEL_SECONDS = 90.0
GATE_SECONDS = 120.0
CONTROL = control.__name__
COPIED = "COPIED"
"""Attribute of a task that counts the bytes copied by a check's small case."""


@dataclass(slots=True)
class Found:
    """All checks there are: tasks, the kernels among them by "<operation>.<check>", and what could not even be imported."""

    tasks: list[Task] = field(default_factory=list)
    kernels: dict[str, KernelCheck] = field(default_factory=dict)
    failures: dict[str, Outcome] = field(default_factory=dict)


def discover(*, devices: Sequence[str] = (), nightly: bool = False, copied: bool = False) -> Found:
    """Import every `budgets.py` and every gate.

    Args:
        devices: those that kernels are compiled for, of the ones they name; all if empty.
        nightly: also what is too long for every change.
        copied: also run the small cases that count copied bytes. They need no compiler for GPUs; the tests run them all the time.
    """
    found = Found()
    for path in sorted(KERNELS.glob("*/budgets.py")):
        _add(found, f"pallas_kernels.{path.parent.name}.budgets", ("KERNELS",), devices)
    for path in sorted(GATES.glob("gate_*.py")):
        _add(found, f"tests.check_gpu.{path.stem}", ("CHECKS", "NIGHTLY") if nightly else ("CHECKS",), devices)
    _add(found, CONTROL, ("KERNELS",), ())
    if copied:
        found.tasks += [
            Task(module=f"pallas_kernels.{operation}.budgets", attribute=COPIED, key=check.name, timeout_seconds=GATE_SECONDS)
            for (operation, _, _), check in ((name.partition("."), check) for name, check in found.kernels.items())
            if check.copied is not None
        ]
    return found


def _add(found: Found, module_name: str, attributes: Iterable[str], devices: Sequence[str]) -> None:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # A module that is broken fails by itself, and the others are checked.
        found.failures[home(module_name)] = Outcome(problems=(f"cannot be imported: {type(error).__name__}: {error}",))
        return
    for attribute in attributes:
        listed = getattr(module, attribute, None)
        if attribute == "KERNELS":
            found.tasks += _kernel_tasks(found, module_name, listed or (), devices)
        elif isinstance(listed, Mapping):
            seconds = getattr(module, "TIMEOUT_SECONDS", GATE_SECONDS)
            found.tasks += [Task(module=module_name, attribute=attribute, key=key, timeout_seconds=seconds) for key in listed]
        elif attribute == "CHECKS":
            found.failures[home(module_name)] = Outcome(
                problems=(f"CHECKS must be a mapping of names to callables, got {type(listed).__name__}",)
            )


def _kernel_tasks(found: Found, module_name: str, checks: Iterable[KernelCheck], devices: Sequence[str]) -> list[Task]:
    tasks: list[Task] = []
    names: set[str] = set()
    for check in checks:
        if check.name in names:
            found.failures[f"{home(module_name)}.{check.name}"] = Outcome(problems=("two checks have this name",))
            continue
        names.add(check.name)
        keys = [f"{check.name}@{device}" for device in check.devices if not devices or device in devices]
        new = [Task(module=module_name, attribute="KERNELS", key=key, timeout_seconds=KERNEL_SECONDS) for key in keys]
        if new and module_name != CONTROL:
            found.kernels[kernel_name(new[0])] = check
        tasks += new
    return tasks


def kernel_name(task: Task) -> str:
    """The name of the kernel that a task compiles, without the device."""
    return task.name.partition("@")[0]


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a person named this task: its operation or module, a check of it, or a pattern (`*.decode*`); no patterns name everything."""
    forms = (name, name.partition("@")[0], name.partition(".")[0])
    return not patterns or any(fnmatchcase(form, pattern) for pattern in patterns for form in forms)
