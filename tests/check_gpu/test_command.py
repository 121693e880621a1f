"""What the command finds, runs and counts; nothing is compiled here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common.budget import KernelCheck
from tests.check_gpu import __main__ as command
from tests.check_gpu import control, discover
from tests.check_gpu.outcome import Outcome, Task


def check(name: str, devices: tuple[str, ...] = ("h100", "h200")) -> KernelCheck:
    return KernelCheck(
        name=name,
        run=abs,
        arguments=(jax.ShapeDtypeStruct((4,), jnp.float32),),
        max_registers=32,
        max_shared_bytes=0,
        required=(),
        floor_bytes=16,
        devices=devices,
    )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two operations with budgets, one of them broken, and a gate."""
    for place in ("kernels/sums/budgets.py", "kernels/broken/budgets.py", "gates/gate_steps.py", "gates/gate_odd.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    sums: Any = ModuleType("sums")
    sums.KERNELS = (check("small"), check("large", ("h200",)), check("small"))
    steps: Any = ModuleType("steps")
    steps.CHECKS, steps.NIGHTLY, steps.TIMEOUT_SECONDS = {"short": dict}, {"long": dict}, 7
    monkeypatch.setitem(sys.modules, "pallas_kernels.sums.budgets", sums)
    monkeypatch.setitem(sys.modules, "tests.check_gpu.gate_steps", steps)
    monkeypatch.setitem(sys.modules, "tests.check_gpu.gate_odd", ModuleType("odd"))
    monkeypatch.setattr(discover, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(discover, "GATES", tmp_path / "gates")
    return tmp_path


@pytest.mark.usefixtures("project")
def test_budgets_gates_and_controls_are_found() -> None:
    found = discover.discover()
    names = [task.name for task in found.tasks if task.module != discover.CONTROL]
    assert names == ["sums.small@h100", "sums.small@h200", "sums.large@h200", "steps.short"]
    assert {task.timeout_seconds for task in found.tasks if task.name == "steps.short"} == {7}
    assert {task.key.partition("@")[0] for task in found.tasks if task.module == discover.CONTROL} == set(control.EXPECTED)
    assert list(found.kernels) == ["sums.small", "sums.large"]
    assert {name: outcome.problems[0].split(":")[0] for name, outcome in found.failures.items()} == {
        "broken": "cannot be imported",
        "sums.small": "two checks have this name",
        "odd": "CHECKS must be a mapping of names to callables, got NoneType",
    }


@pytest.mark.usefixtures("project")
def test_a_device_and_the_night_choose_among_them() -> None:
    found = discover.discover(devices=["h100"], nightly=True)
    assert [task.name for task in found.tasks if task.module != discover.CONTROL] == ["sums.small@h100", "steps.short", "steps.long"]
    # What is not compiled for this device is not counted either.
    assert list(found.kernels) == ["sums.small"]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["sums"], ["sums.small@h100", "sums.small@h200", "sums.large@h200"]),
        (["sums.large", "steps"], ["sums.large@h200", "steps.short"]),
        (["*.small@h100"], ["sums.small@h100"]),
        (["nothing"], []),
    ],
)
def test_names_and_patterns(names: list[str], expected: list[str]) -> None:
    assert [task.name for task in discover.discover().tasks if discover.is_named(task.name, names)] == expected


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], problems: dict[str, tuple[str, ...]]) -> tuple[int, list[Task]]:
    """The command with compilation replaced: its exit status, and what it would have compiled."""
    tried: list[Task] = []

    def run_all(tasks: list[Task], _: Any, tell: Any) -> dict[Task, Outcome]:
        said = {name: tuple(map(str, EXPECTED_TEXTS[name])) for name in control.EXPECTED}
        outcomes = {}
        for task in tasks:
            tried.append(task)
            of_control = said[task.key.partition("@")[0]] if task.module == discover.CONTROL else ()
            outcomes[task] = Outcome(problems=problems.get(task.name, of_control))
            tell(task, outcomes[task])
        return outcomes

    monkeypatch.setattr(command, "run_all", run_all)
    return command.main(arguments), tried


EXPECTED_TEXTS = {
    "sound": (),
    "spills": ("k: spills 8 bytes, none allowed", "k: C7511: wgmma.mma_async instructions are serialized"),
    "lacks_int8": ("no instruction wgmma.*s8, only mma",),
    "many_registers": ("k: 170 registers, at most 64 allowed",),
}


@pytest.fixture
def toolchain(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toolchain that is installed, and no module that is broken."""
    (project / "kernels/broken/budgets.py").unlink()
    (project / "gates/gate_odd.py").unlink()
    sys.modules["pallas_kernels.sums.budgets"].KERNELS = (check("small"), check("large", ("h200",)))  # type: ignore[attr-defined]
    (project / ".gpu-toolchain/cuda13").mkdir(parents=True)
    (project / ".gpu-toolchain/cuda13/stamp").touch()
    monkeypatch.setattr(command, "ROOT", project)


@pytest.mark.usefixtures("toolchain")
def test_the_last_line_counts_the_kernels_that_passed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [], {})[0] == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 kernels compiled"


@pytest.mark.usefixtures("toolchain")
def test_a_kernel_that_fails_on_one_device_does_not_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, [], {"sums.small@h100": ("k: 33 registers, at most 32 allowed",)})[0] == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("FAILED")] == ["sums.small@h100"]
    assert "        k: 33 registers, at most 32 allowed" in lines
    assert lines[-1] == "1 kernels compiled"


@pytest.mark.usefixtures("toolchain")
def test_a_gate_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [], {"steps.short": ("peak",)})[0] == 1


@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("name", control.EXPECTED)
def test_a_checker_that_misjudges_a_control_fails(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = () if control.EXPECTED[name] else ("k: spills 8 bytes, none allowed",)
    status, tried = run(monkeypatch, ["sums.large"], {f"control.{name}@h200": wrong})
    assert status == 1
    assert "the checker should have said" in capsys.readouterr().out
    # They run whatever is named.
    assert {task.name for task in tried} == {"sums.large@h200", *(f"control.{name}@h200" for name in control.EXPECTED)}


@pytest.mark.usefixtures("toolchain")
def test_unknown_names_and_a_missing_toolchain_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, ["nothing"], {}) == (2, [])
    assert "nothing is called nothing" in capsys.readouterr().err
    assert run(monkeypatch, ["--plugin", "cuda12"], {}) == (2, [])
    assert "scripts/gpu_toolchain.sh cuda12" in capsys.readouterr().err


@pytest.mark.usefixtures("toolchain")
def test_a_module_that_is_broken_fails_those_who_name_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "gates/gate_odd.py").touch()
    assert run(monkeypatch, [], {})[0] == 1
    assert run(monkeypatch, ["odd"], {})[0] == 1
    assert run(monkeypatch, ["sums"], {})[0] == 0
