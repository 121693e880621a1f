"""benchmarks/kv.py: what its figures are made of, and that a claim which is not true is said not to hold."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kv_parts import bench, preemption, shared_prefix, waste
from jaxinfer.step_trace import StepTimes


def preemption_figures(*, swap: tuple[float, ...], recompute: tuple[float, ...], stated: int | None) -> dict[str, Any]:
    lengths = (16, 64, 256)
    return {
        "lengths": lengths,
        "resume_seconds": {"swap": dict(zip(lengths, swap, strict=True)), "recompute": dict(zip(lengths, recompute, strict=True))},
        "preempt_seconds": {"swap": dict.fromkeys(lengths, 0.25), "recompute": dict.fromkeys(lengths, 0.125)},
        "stated_break_even_tokens": {"swap": stated, "fetch": 1},
        "overload": {
            "swap": [{"output_tokens_per_second": 3.0}],
            "recompute": [{"output_tokens_per_second": speed} for speed in (2.0, 1.0)],
        },
    }


@pytest.mark.parametrize(("stated", "holds"), [(17, True), (64, True), (16, False), (None, False)])
def test_the_stated_break_even_is_put_to_the_test(stated: int | None, holds: bool) -> None:
    """16 tokens: 0.25 s to store and load against 0.2; 64: 0.5 against 1; 256: 1 against 4."""
    figures = preemption_figures(swap=(0.125, 0.375, 0.875), recompute=(0.2, 1.0, 4.0), stated=stated)
    judged = preemption.judge(figures)
    assert judged["round_trip_seconds"] == {16: 0.25, 64: 0.5, 256: 1.0}
    assert judged["observed_break_even_tokens"] == 64
    assert list(judged["holds"].values()) == [holds, True]
    assert judged["overload_ratio"] == 1.5


def test_a_swap_that_never_pays_has_no_break_even() -> None:
    judged = preemption.judge(preemption_figures(swap=(1.0, 1.0, 9.0), recompute=(2.0, 2.0, 4.0), stated=1))
    assert judged["observed_break_even_tokens"] is None
    assert list(judged["holds"].values()) == [False, True]


def test_prefill_time_is_that_of_steps_with_more_tokens_than_rows() -> None:
    """The second step is launched while the first one runs: it counts from the end of that one."""
    steps = [
        StepTimes(0, num_rows=1, num_tokens=512, launch_begin=10.0, ready=12.0),
        StepTimes(1, num_rows=3, num_tokens=40, launch_begin=11.0, ready=12.5),
        StepTimes(2, num_rows=3, num_tokens=3, launch_begin=12.0, ready=20.0),
        StepTimes(3, num_rows=1, num_tokens=2, launch_begin=30.0, ready=30.25),
    ]
    assert shared_prefix.prefill_seconds(steps) == 2.0 + 0.5 + 0.25


def test_floors_are_the_arithmetic_of_the_model() -> None:
    machine = bench.Machine(46_080e3, 1.0, 1.0, 212.3e6)
    assert machine.copy_seconds(2000, 2) == pytest.approx(4.0)
    # Two tokens behind 100: 2 x 212.3e6, and 100 + 1 and 100 + 2 pairs of 69,120.
    assert machine.prefill_seconds(2, 100) == pytest.approx(2 + 203 * 69_120 / 212.3e6)


def test_static_allocation_wastes_what_paging_does_not() -> None:
    paged = waste.simulate("paged", 100).figures["kv_waste_percent"]
    static = waste.simulate("static", 100).figures["kv_waste_percent"]
    assert paged < 5 < 80 < static < 95
