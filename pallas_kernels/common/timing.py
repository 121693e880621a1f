"""Timing of jitted calls."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CALLS_IN_BODY = 4
"""Calls in a loop's body: the loop's own counters, two kernels of about 1 us, are shared by them."""
MANY_CALLS = 64
"""With so many, each short, twice as many share them."""


def median_seconds(run: Callable[[], Any], *, num_runs: int = 20) -> float:
    """The median wall time of a call, its result waited for; one call before that is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(num_runs):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def chain(
    call: Callable[[Any], Any], num_sets: int, struct: Any, *, num_calls: int, feed: Callable[[Any, Any], Any] | None = None
) -> tuple[Callable[[Sequence[Any], Any], Any], Any, int]:
    """What `Chain` compiles, a function of the sets and of what it gave last; what it gives, abstractly; how many calls it makes.

    All results are given, each through the barrier that the next call's arguments come from. A barrier that gives nothing
    that is used is dropped, and the calls before it with it: every one here gives a result, or the counter.
    """
    wanted = min(num_calls, CALLS_IN_BODY * (1 + (num_calls >= MANY_CALLS)))
    rounds_in_body = -(-wanted // num_sets)
    calls_in_body = rounds_in_body * num_sets
    num_rounds = max(1, num_calls // calls_in_body)
    call = jax.jit(call)  # traced and lowered once, not once for each call
    result = jax.eval_shape(call, struct)
    counter = jax.ShapeDtypeStruct((), jnp.int32)

    def in_turn(sets: Sequence[Any], last: Any) -> Any:
        count, _ = last
        results: list[Any] = []
        for arguments in [*sets] * rounds_in_body:
            if results:
                arguments, results[-1] = lax.optimization_barrier((arguments, results[-1]))
            else:
                arguments, count = lax.optimization_barrier((arguments, count))
            results.append(call(arguments))
        return count + 1, results

    def in_place(sets: Sequence[Any], last: Any) -> Any:
        assert feed is not None
        count, (value,) = last
        for arguments in [*sets] * rounds_in_body:
            value = call(feed(arguments, value))
        return count + 1, [value]

    body, num_results = (in_turn, calls_in_body) if feed is None else (in_place, 1)

    def chained(sets: Sequence[Any], last: Any) -> Any:
        return lax.fori_loop(0, num_rounds, lambda _, last: body(sets, last), last)

    return chained, (counter, [result] * num_results), num_rounds * calls_in_body


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Many calls as one compiled program: what they take is the device's time, not that of launching them from Python.

    The sets of arguments take turns, so that with enough of them nothing is found in the L2 cache. Every call waits for the one
    before, and the compiler sees all its arguments as new: it can neither drop a call nor compute a part of one beforehand.
    """

    compiled: Any
    """Takes the sets and what it gave last, whose memory it uses again."""
    result: Any
    """What it gives, abstractly."""
    num_calls: int

    @classmethod
    def compile(
        cls, call: Callable[[Any], Any], num_sets: int, struct: Any, *, num_calls: int, feed: Callable[[Any, Any], Any] | None = None
    ) -> Chain:
        """Trace and compile at least `num_calls` calls.

        Args:
            call: takes one set of arguments.
            num_sets: sets that `seconds` will be given.
            struct: a set's pytree, of arrays or `jax.ShapeDtypeStruct`.
            num_calls: about how many; whole rounds over the sets are made of them.
            feed: (arguments, the result before) -> arguments; for a function that updates its argument in place.
        """
        chained, result, made = chain(call, num_sets, struct, num_calls=num_calls, feed=feed)
        compiled = jax.jit(chained, donate_argnums=1).lower([struct] * num_sets, result).compile()
        return cls(compiled=compiled, result=result, num_calls=made)

    def _first_result(self) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.result)

    def seconds(self, sets: Sequence[Any], *, num_runs: int = 3) -> float:
        """Wall time of one call, the least of several runs: what else happens on a machine only adds."""
        result = jax.block_until_ready(self.compiled(sets, self._first_result()))
        taken = []
        for _ in range(num_runs):
            started = time.perf_counter()
            result = jax.block_until_ready(self.compiled(sets, result))
            taken.append(time.perf_counter() - started)
        return min(taken) / self.num_calls

    def kernel_seconds(self, sets: Sequence[Any]) -> float | None:
        """Time of one call in which any kernel ran, by the profiler; None where it sees no kernels (on a CPU).

        What is missing from `seconds` is the launching of kernels, which weighs on those that take microseconds.
        """
        result = jax.block_until_ready(self._first_result())
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # only the device is of interest, and tracing Python takes its time
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                jax.block_until_ready(self.compiled(sets, result))
            files = list(Path(folder).rglob("*.xplane.pb"))
            spans = kernel_spans(jax.profiler.ProfileData.from_file(str(files[0]))) if files else []
        return busy(spans) / 1e9 / self.num_calls if spans else None


def kernel_spans(profile: Any) -> list[tuple[float, float, str]]:
    """Begin, end (nanoseconds) and name of everything that ran on the streams of a GPU; `profile` is jax.profiler.ProfileData."""
    return [
        (event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def busy(spans: Sequence[tuple[float, float, str]]) -> float:
    """How long at least one span was open."""
    total, reached = 0.0, float("-inf")
    for begin, end, _ in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
