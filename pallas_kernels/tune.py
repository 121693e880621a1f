"""`python -m pallas_kernels.tune`: which tile sizes are fastest on this GPU; writes the tables that ship, see `common.tuned`.

Every kernel that looks tables up is run at the shapes of its operation's `served.py` with each of its `CANDIDATES`. Cases that
look up one key share its entry: the candidate with the least geometric mean of times, relative to those of the kernel's own rule,
if that is less than the rule's by more than a measurement wavers. Then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.common import discovery, mosaic, tuned
from pallas_kernels.common.compare import row_error
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.served import Case, cases
from pallas_kernels.common.timing import Chain, median_seconds

MIN_GAIN = 0.02
MAX_ROW_ERROR = 1e-2
"""Between a candidate's result and that of the kernel's own rule; sums in another order differ by less, a wrong tile by far more."""
CACHE_BYTES = 128 * 2**20
MAX_SETS = 8
CALLS = 64
TINY_CANDIDATES = 2
IMPLEMENTATION = "mosaic"
THREADS = 8

Config = Mapping[str, Any]


@dataclass(slots=True)
class Entry:
    """What was measured for one key: of each case the rule's seconds, and of each candidate's those relative to the rule's."""

    rule_seconds: dict[str, float] = field(default_factory=dict)
    relative: dict[str, dict[str, float]] = field(default_factory=dict)

    def best(self) -> tuple[Config, float] | None:
        """The candidate with the least geometric mean over all cases, and that mean; None: nothing beats the rule."""
        means = {
            config: math.prod(of_case.values()) ** (1 / len(of_case))
            for config, of_case in self.relative.items()
            if of_case.keys() == self.rule_seconds.keys()
        }
        if not means:
            return None
        config = min(means, key=lambda name: means[name])
        return (json.loads(config), means[config]) if means[config] < 1 - MIN_GAIN else None


def candidates(operation: str) -> list[Config]:
    """The fields of every candidate of an operation's kernels, once."""
    found: dict[str, Config] = {}
    for module in discovery.kernel_modules(operation):
        for candidate in getattr(module, "CANDIDATES", ()):
            fields = dataclasses.asdict(candidate)
            found.setdefault(json.dumps(fields, sort_keys=True), fields)
    return list(found.values())


def keys_of(case: Case, call: Callable[[Any], Any]) -> list[str]:
    """What is looked up when a case is traced.

    Raises:
        UnsupportedByKernel: the kernel does not take the case.
    """
    with tuned.trying(case.operation, None, None) as trial:
        jax.eval_shape(lambda arrays: call(arrays), jax.eval_shape(case.make, jax.random.key(0)))
    return list(dict.fromkeys(trial.keys))


def fitting(case: Case, key: str, configs: list[Config]) -> list[Config]:
    """Those candidates that are of the kernel which looks the key up: others of the operation have other fields."""
    groups: dict[frozenset[str], list[Config]] = {}
    for config in configs:
        groups.setdefault(frozenset(config), []).append(config)
    return [config for group in groups.values() if len(groups) == 1 or _is_taken(case, key, group[0]) for config in group]


def _is_taken(case: Case, key: str, config: Config) -> bool:
    call, struct = caller(case), jax.eval_shape(case.make, jax.random.key(0))
    try:
        with tuned.trying(case.operation, key.split(" ", 1)[0], config):
            jax.eval_shape(call, struct)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            return False
        raise
    except UnsupportedByKernel:
        return True  # the next one of its kind may fit
    return True


def caller(case: Case) -> Callable[[Any], Any]:
    """The operation with a case's static arguments."""
    run = getattr(importlib.import_module(f"pallas_kernels.{case.operation}.api"), case.operation)
    return lambda arrays: run(**arrays, **case.static, implementation=IMPLEMENTATION)


class Timer:
    """Times a case with one configuration after another."""

    def __init__(self, case: Case, *, is_tiny: bool):
        self._case = case
        self._is_tiny = is_tiny
        self._num_sets = 1 if is_tiny else max(1, min(MAX_SETS, math.ceil(CACHE_BYTES / case.floor_bytes)))
        self._sets = [jax.jit(case.make)(jax.random.key(seed)) for seed in range(self._num_sets)]
        self._expected: list[np.ndarray] | None = None

    def compile(self, kernel: str, config: Config | None) -> tuple[Any, Any]:
        """One call, and many; in any thread."""
        with tuned.trying(self._case.operation, kernel, config):
            call = caller(self._case)
            single = jax.jit(lambda arrays: call(arrays)).lower(self._sets[0]).compile()
            if self._is_tiny:
                return single, None
            struct = jax.eval_shape(self._case.make, jax.random.key(0))
            return single, Chain.compile(call, self._num_sets, struct, num_calls=CALLS, feed=self._case.feed)

    def seconds(self, compiled: tuple[Any, Any]) -> float:
        """Of one call.

        Raises:
            ArithmeticError: the result is another one than the first configuration's.
        """
        single, chain = compiled
        results = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(single(self._sets[0]))]
        if self._expected is None:
            self._expected = results
        error = max(row_error(actual, expected) for actual, expected in zip(results, self._expected, strict=True))
        if not error <= MAX_ROW_ERROR:
            raise ArithmeticError(f"a row differs from the rule's result by {error:.2g}")
        if chain is None:
            return median_seconds(lambda: single(self._sets[0]), num_runs=1)
        return chain.kernel_seconds(self._sets) or chain.seconds(self._sets)


def tune(operation: str, *, is_tiny: bool, deadline: float, report: Callable[[str], None]) -> dict[str, Entry]:
    """Measure every served case of an operation; by key."""
    entries: dict[str, Entry] = {}
    configs = candidates(operation)
    for case in cases(operation, is_tiny=is_tiny):
        try:
            keys = keys_of(case, caller(case))
        except UnsupportedByKernel as refusal:
            report(f"{operation} {case.name}: {refusal.reason}")
            continue
        for key in keys if configs else ():
            if time.monotonic() > deadline:
                report(f"{operation} {case.name}: left out, the time is up")
                return entries
            taken = fitting(case, key, configs)[: TINY_CANDIDATES if is_tiny else None]
            _tune_case(case, key, taken, entries.setdefault(key, Entry()), is_tiny, report)
        if is_tiny and entries:
            break
    return entries


def _tune_case(case: Case, key: str, configs: list[Config], entry: Entry, is_tiny: bool, report: Callable[[str], None]) -> None:
    timer, kernel = Timer(case, is_tiny=is_tiny), key.split(" ", 1)[0]
    rule = entry.rule_seconds[case.name] = timer.seconds(timer.compile(kernel, None))
    report(f"{case.operation} {case.name}: {key}: the rule takes {rule * 1e6:.1f} us")
    with ThreadPoolExecutor(max_workers=1 if is_tiny else THREADS) as pool:
        compiling = [(config, pool.submit(timer.compile, kernel, config)) for config in configs]
        for config, future in compiling:
            try:
                seconds = timer.seconds(future.result())
            # Whatever a configuration that does not fit makes a compiler say: it is told, and is no candidate then.
            except Exception as error:
                report(f"  {config}: {type(error).__name__}: {str(error).strip()[:120]}")
                continue
            entry.relative.setdefault(json.dumps(config, sort_keys=True), {})[case.name] = seconds / rule
            report(f"  {config}: {seconds * 1e6:.1f} us, {seconds / rule:.3f} of the rule's")


def table_of(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Entries of the table: those keys for which something beats the rule."""
    found = {key: (entry, entry.best()) for key, entry in sorted(entries.items())}
    return {
        key: {
            "config": best[0],
            "relative_time": round(best[1], 4),
            "rule_microseconds": {name: round(seconds * 1e6, 2) for name, seconds in entry.rule_seconds.items()},
        }
        for key, (entry, best) in found.items()
        if best is not None
    }


def write_table(path: Path, measured: Mapping[str, Entry]) -> int:
    """Put what was measured in the place of the old entries of the same keys; others stay. Returns how many entries there are then.

    A key that was measured and has no better candidate loses its entry: the kernel's rule serves it.
    """
    table = {key: value for key, value in tuned.read_table(path).items() if key not in measured} | table_of(measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    os.replace(unfinished, path)
    tuned.read_table.cache_clear()
    return len(table)


def main() -> None:
    """Sweep, write, say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", nargs="+", choices=discovery.operation_names(), default=discovery.operation_names())
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="where <operation>/tuned/<device kind>.json is written; default: this package")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: in the interpreter, which shows that the loop works")
    parser.add_argument("--tiny", action="store_true", help="one small shape and few candidates of each operation")
    args = parser.parse_args()
    if args.device == "cpu" and not (args.tiny and args.out):
        parser.error("--device cpu needs --tiny and --out: the interpreter's times may not ship")
    if args.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)  # the interpreter's warpgroups wait for each other, each on a thread
    elif not mosaic.device().is_hopper:
        parser.error(f"needs a Hopper GPU, this is {mosaic.device().kind}")
    deadline = time.monotonic() + 60 * args.minutes
    summary = {name: done for name, done in _tune_all(args, deadline)}
    print(json.dumps({"tuned": summary, "device": mosaic.device().kind, "jax": jax.__version__, "is_tiny": args.tiny}))


def _tune_all(args: argparse.Namespace, deadline: float) -> Iterator[tuple[str, dict[str, int]]]:
    for index, operation in enumerate(args.operations):
        is_tunable = IMPLEMENTATION in discovery.operation(operation).implementations
        if not is_tunable or not candidates(operation):
            print(f"{operation}: has no kernel for GPUs that lists candidates")
            continue
        now = time.monotonic()
        share = now + (deadline - now) / (len(args.operations) - index)  # what one leaves, the others have
        entries = tune(operation, is_tiny=args.tiny, deadline=share, report=lambda line: print(line, flush=True))
        path = tuned.table_path(operation, mosaic.device().kind, args.out or tuned.PACKAGE)
        yield operation, {"keys": len(entries), "entries": write_table(path, entries)}


if __name__ == "__main__":
    main()
