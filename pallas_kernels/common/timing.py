"""Timing of jitted calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax


def median_seconds(run: Callable[[], Any], *, num_runs: int = 20) -> float:
    """The median wall time of a call, its result waited for; one call before that is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(num_runs):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return median(seconds)
