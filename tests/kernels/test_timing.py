"""Timing: that what is timed is done, as often as is said."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.timing import Chain, busy, chain, kernel_spans

SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def compiled(call: Any, num_sets: int, num_calls: int, feed: Any = None) -> tuple[str, int]:
    """The optimized program of a chain, and how many calls it says it makes."""
    chained, result, made = chain(call, num_sets, SQUARE, num_calls=num_calls, feed=feed)
    return jax.jit(chained).lower([SQUARE] * num_sets, result).compile().as_text(), made


def body_of(text: str) -> str:
    """The computation that the loop repeats."""
    name = text.split(", body=%")[1].split(",")[0].split("\n")[0]
    return text[text.index(f"\n%{name} ") :].split("\n}\n")[0]


@pytest.mark.parametrize(("num_sets", "num_calls", "in_body"), [(1, 8, 4), (2, 16, 4), (3, 12, 6), (2, 128, 8)])
def test_no_call_is_dropped_or_taken_out_of_the_loop(num_sets: int, num_calls: int, in_body: int) -> None:
    """Nobody needs the results and the arguments never change: a compiler would drop all calls but one, and do that one once."""
    text, made = compiled(jnp.sin, num_sets, num_calls)
    assert made == num_calls
    assert len(re.findall(r"calls=%wrapped_sine|\bsine\(", body_of(text))) == in_body


def test_a_chain_in_place_hands_the_result_on() -> None:
    """x + 1 as often as is said, over two runs as their results are handed on too."""
    calls = Chain.compile(lambda x: x + 1, 1, SQUARE, num_calls=4, feed=lambda arguments, result: result)
    assert calls.num_calls == 4
    first = calls.compiled([jnp.zeros((8, 8))], (jnp.zeros((), jnp.int32), [jnp.zeros((8, 8))]))
    count, (value,) = calls.compiled([jnp.zeros((8, 8))], first)
    np.testing.assert_array_equal(value, np.full((8, 8), 8.0))
    assert int(count) == 2


def test_seconds_are_of_one_call() -> None:
    calls = Chain.compile(lambda x: x @ x, 2, SQUARE, num_calls=8)
    sets = [jnp.ones((8, 8))] * 2
    assert 0 < calls.seconds(sets, num_runs=1) < 1
    assert calls.kernel_seconds(sets) is None, "a CPU has no streams"


def test_only_what_ran_on_streams_counts_and_only_once() -> None:
    """The profile has the same time again in lines of programs and operations; kernels of two streams may overlap."""

    def line(name: str, *spans: tuple[int, int]) -> Any:
        events = [SimpleNamespace(name="kernel", start_ns=begin, duration_ns=end - begin) for begin, end in spans]
        return SimpleNamespace(name=name, events=events)

    lines = [line("Stream #13(compute)", (0, 10), (20, 30)), line("Stream #14", (5, 15)), line("XLA Modules", (0, 100))]
    profile = SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=lines), SimpleNamespace(name="/host:CPU", lines=lines)])
    spans = kernel_spans(profile)
    assert sorted(span[:2] for span in spans) == [(0, 10), (5, 15), (20, 30)]
    assert busy(spans) == 25
