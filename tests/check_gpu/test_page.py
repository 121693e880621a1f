"""docs/kernels.md is what was compiled, of every kernel that there is."""

from __future__ import annotations

from typing import Any

from tests.check_gpu.discover import Found, discover
from tests.check_gpu.outcome import Outcome, Task
from tests.check_gpu.page import PAGE, START, main_instructions, microseconds, newest, render, result

AGAIN = "run `python -m tests.check_gpu --write-docs`"


def test_the_page_is_the_newest_result() -> None:
    _, start, made = PAGE.read_text(encoding="utf-8").partition(START)
    assert start
    assert made.strip() == render(newest()).strip(), AGAIN


def test_every_kernel_with_a_budget_is_on_the_page() -> None:
    assert set(newest()["kernels"]) == set(discover().kernels), AGAIN


def kernel(name: str, registers: int, *, compiler: str = "mosaic", **instructions: int) -> dict[str, Any]:
    return {
        "name": name,
        "compiler": compiler,
        "registers": registers,
        "spill_bytes": 0,
        "shared_bytes": 2048,
        "instructions": instructions,
    }


def figures(*kernels: dict[str, Any]) -> dict[str, Any]:
    return {"kernels": list(kernels), "subject": "mosaic", "floor_seconds": 12.34e-6}


def test_a_row_has_the_kernels_of_its_check_below_each_other() -> None:
    stored = {
        "date": "2026-01-01",
        "plugin": "cuda13",
        "versions": {"jax": "1"},
        "kernels": {
            "sums.two": {
                "h100": figures(kernel("a", 1)),
                "h200": figures(kernel("a", 90, mma=1), kernel("b", 40), kernel("x", 9, compiler="xla")),
            },
            "sums.old": {"a100": figures(kernel("a", 8))},
        },
        "copied": {"sums.two": {"bytes": 102, "floor_bytes": 100}},
        "programs": {"step.llama": {"peak_mib": 12345, "decode": {"kernels": 3}}},
    }
    lines = render(stored).splitlines()
    assert lines[0] == "Compiled on 2026-01-01 with jax 1 and the cuda13 plugin."
    assert "| `two` | 90<br>40 | 2.0<br>2.0 | 1 `mma` | 1.020 | 12.3 |" in lines
    assert "| `old` (A100) | 8 | 2.0 |  |  |  |" in lines
    assert lines[-1] == "| `step.llama` | peak mib 12,345, decode (kernels 3) |"


def test_floors_from_nanoseconds_to_milliseconds() -> None:
    assert [microseconds(seconds) for seconds in (3.21e-8, 4.8e-6, 9.87e-5, 1.234e-3)] == ["0.0321", "4.8", "98.7", "1,234"]


def test_bulk_copies_of_all_dimensions_count_together() -> None:
    counted = main_instructions(
        {
            "cp.async.bulk.tensor.2d.load": 3,
            "cp.async.bulk.tensor.5d.load": 4,
            "cp.async.bulk.tensor.2d.store": 1,
            "cp.async.bulk.load": 2,
            "cp.async.bulk.commit_group": 9,
            "cp.async.cg": 5,
            "wgmma.m64n8k32.s32.s8.s8": 6,
            "ldmatrix.m8n8.x4.shared.b16": 7,
        }
    )
    assert counted.split("<br>") == [
        "2 `cp.async.bulk.load`",
        "7 `cp.async.bulk.tensor.load`",
        "1 `cp.async.bulk.tensor.store`",
        "5 `cp.async.cg`",
        "6 `wgmma.m64n8k32.s32.s8.s8`",
    ]


def test_what_is_stored_tells_kernels_copies_and_programs_apart() -> None:
    found = Found(kernels={"sums.two": None})  # type: ignore[dict-item]
    made = {
        Task(module=module, attribute=attribute, key=key, timeout_seconds=1): Outcome(figures={"of": key})
        for module, attribute, key in (
            ("pallas_kernels.sums.budgets", "KERNELS", "two@h200"),
            ("pallas_kernels.sums.budgets", "COPIED", "two"),
            ("tests.check_gpu.gate_step", "CHECKS", "llama"),
            ("tests.check_gpu.control", "KERNELS", "sound@h200"),
        )
    }
    stored = result(found, made, "cuda13", "2026-01-01")
    assert stored["kernels"] == {"sums.two": {"h200": {"of": "two@h200"}}}
    assert stored["copied"] == {"sums.two": {"of": "two"}}
    assert stored["programs"] == {"step.llama": {"of": "llama"}}
