"""Part `kernels_<operation>`: how long each call takes, against what its bytes and products would take, and against others."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from benchmarks.gpu.peers import peers
from benchmarks.gpu.rows import Rows
from pallas_kernels.common.dispatch import Operation, UnsupportedByKernel
from pallas_kernels.common.mosaic import device
from pallas_kernels.common.served import Case, cases
from pallas_kernels.common.timing import Chain

CACHE_BYTES = 64 * 2**20
"""More than the L2 cache of an H100 or H200: arguments take turns until they are twice this."""
MAX_SETS = 8
SECONDS_PER_RUN = 0.02
MAX_CALLS = 256
COMPILE_THREADS = 8
CASES_AT_ONCE = 4
PROFILED_SECONDS = 100e-6
"""Calls shorter than this are profiled too: the time between two launches, a few microseconds, would count as theirs."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Somebody who can do a case's work: `call` takes what `make` makes."""

    name: str
    make: Callable[[jax.Array], Any]
    call: Callable[[Any], Any]
    feed: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A contender for a case, and its programs as they are compiled."""

    case: Case
    contender: Contender
    num_sets: int
    programs: Future[tuple[Chain, Any]]


def measure(rows: Rows, *, operation: str, is_tiny: bool, rates: dict[str, float]) -> None:
    """A few cases at a time, the most telling first: all their programs are compiled at once, then timed in turn, alone on the device."""
    found = cases(operation, is_tiny=is_tiny)
    if not found:
        rows.add(operation=operation, reason="not here: the operation has no served.py")
    with ThreadPoolExecutor(max_workers=1 if is_tiny else COMPILE_THREADS) as pool:
        for group in itertools.batched(found, CASES_AT_ONCE):
            if rows.is_out_of_time(needs=0 if is_tiny else 12, what=f"{operation} " + ", ".join(case.name for case in group)):
                continue
            entrants = [entrant for case in group for entrant in enter(rows, case, pool, is_tiny, rates)]
            wait([entrant.programs for entrant in entrants])
            sets: dict[Any, Any] = {}
            for entrant in entrants:
                time_entrant(rows, entrant, sets, rates)


def enter(rows: Rows, case: Case, pool: ThreadPoolExecutor, is_tiny: bool, rates: dict[str, float]) -> Iterator[Entrant]:
    """Start compiling for everybody who is here, and note who is not."""
    num_sets = 2 if is_tiny else max(1, min(MAX_SETS, math.ceil(2 * CACHE_BYTES / case.floor_bytes)))
    for contender in contenders(case):
        if isinstance(contender, str):
            name, _, reason = contender.partition(": ")
            rows.add(operation=case.operation, case=case.name, contender=name, reason=f"not here: {reason}")
        else:
            programs = pool.submit(compile_programs, contender, num_sets, calls_of(case, rates, is_tiny))
            yield Entrant(case=case, contender=contender, num_sets=num_sets, programs=programs)


def calls_of(case: Case, rates: dict[str, float], is_tiny: bool) -> int:
    """As many as fill a run, were they twice as long as their floor."""
    floor = case.floor_seconds(rates)
    if is_tiny or floor is None:
        return 2
    return max(4, min(MAX_CALLS, int(SECONDS_PER_RUN / (2 * floor))))


def contenders(case: Case) -> Iterator[Contender | str]:
    """Our implementations, then others; a string says who is missing and why: `name: reason`."""
    api = importlib.import_module(f"pallas_kernels.{case.operation}.api")
    operation: Operation = api.OPERATION
    call = getattr(api, case.operation)
    for name in operation.implementations:
        if name == "reference" or (name not in operation.if_named and not case.is_compared):
            continue
        if name in operation.if_named and not device().is_hopper:
            yield f"{name}: needs a Hopper GPU, and the interpreter's time says nothing"
        else:
            run = partial(_call, call, static=case.static, implementation=name)
            yield Contender(name=name, make=case.make, call=run, feed=case.feed)
    if case.is_compared:
        for name, peer in peers(case).items():
            yield f"{name}: {peer}" if isinstance(peer, str) else Contender(name=name, make=peer[0], call=peer[1])


def _call(call: Callable[..., Any], arrays: dict[str, Any], *, static: dict[str, Any], implementation: str) -> Any:
    return call(**arrays, **static, implementation=implementation)


def compile_programs(contender: Contender, num_sets: int, num_calls: int) -> tuple[Chain, Any]:
    """The chain, from shapes alone, and what makes its arguments: nothing is allocated meanwhile."""
    key = jax.random.key(0)
    chain = Chain.compile(contender.call, num_sets, jax.eval_shape(contender.make, key), num_calls=num_calls, feed=contender.feed)
    return chain, jax.jit(contender.make).lower(key).compile()


def time_entrant(rows: Rows, entrant: Entrant, sets: dict[Any, Any], rates: dict[str, float]) -> None:
    """Fill a row. `sets` keeps the arguments for those who take the same."""
    case, contender = entrant.case, entrant.contender
    with rows.row(operation=case.operation, case=case.name, contender=contender.name) as row:
        try:
            chain, make = entrant.programs.result()
        except UnsupportedByKernel as refusal:
            row["reason"] = f"not here: {refusal.reason}"
            return
        if contender.make not in sets:
            sets.clear()  # the memory of the last ones first
            sets[contender.make] = [make(jax.random.key(seed)) for seed in range(entrant.num_sets)]
        seconds = chain.seconds(sets[contender.make])
        row |= {"microseconds": seconds * 1e6, "calls": chain.num_calls, **shares(case, seconds, rates)}
        if seconds < PROFILED_SECONDS:
            row |= profiled(chain, sets[contender.make], case, rates)


def profiled(chain: Chain, sets: list[Any], case: Case, rates: dict[str, float]) -> dict[str, Any]:
    """The kernels' own time, and the shares by it. A machine may forbid its profiler, which costs no more than that figure."""
    try:
        seconds = chain.kernel_seconds(sets)
    except Exception as error:
        return {"not_profiled": f"{type(error).__name__}: {str(error)[:200]}"}
    return {} if seconds is None else {"kernel_microseconds": seconds * 1e6, **shares(case, seconds, rates)}


def shares(case: Case, seconds: float, rates: dict[str, float]) -> dict[str, Any]:
    """Of the copy's bandwidth, of the matrix units' rate, and of the one that binds; the kernel's time where the profiler gave it."""
    row: dict[str, Any] = {"floor_bytes": case.floor_bytes, "floor_flops": case.floor_flops}
    floor = case.floor_seconds(rates)
    if floor is not None:
        row |= {"share_of_bandwidth": case.floor_bytes / rates["bytes_per_second"] / seconds, "share_of_roofline": floor / seconds}
    return row | {"share_of_peak": case.floor_flops / rates[case.peak] / seconds}
