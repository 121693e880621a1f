"""Python's garbage collector, set for a process that is a server and nothing else."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 50_000


def settle_garbage_collector() -> None:
    """Keep full collections out of the steps.

    What was loaded lives as long as the process and need not be walked. A step of 256 rows makes some thousand objects that
    die with it; by default each step would be interrupted for them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
