"""Calls at the shapes of models that are served: what is tuned and timed on a GPU. Each operation's are in its `served.py`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

GATE_UP, DOWN = (28_672, 4096), (4096, 14_336)
"""Outputs and inputs of the largest matrices of Llama-3-8B."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        make: random arguments from a key, made on the device; arrays by the names of the operation's signature.
        static: the signature's other arguments.
        floor_bytes: every input that is needed read once, every output written once.
        floor_flops: of the matrix products, two for a multiplication and an addition.
        peak: the rate that `floor_flops` is set against.
        sizes: what others need to build the same case.
        feed: for what is updated in place: (arguments, result before) -> arguments.
        is_compared: whether other implementations are timed too.
    """

    operation: str
    name: str
    make: Callable[[jax.Array], dict[str, Any]]
    static: dict[str, Any]
    floor_bytes: int
    floor_flops: int = 0
    peak: str = "bfloat16"
    sizes: dict[str, Any] = field(default_factory=dict)
    feed: Callable[[Any, Any], Any] | None = None
    is_compared: bool = True

    def floor_seconds(self, rates: dict[str, float]) -> float | None:
        """The larger of the two at the rates of this machine; None where its bandwidth is not known."""
        if "bytes_per_second" not in rates:
            return None
        return max(self.floor_bytes / rates["bytes_per_second"], self.floor_flops / rates[self.peak])


def cases(operation: str, *, is_tiny: bool) -> list[Case]:
    """Those of an operation, the most telling first; none where its folder has no `served.py`. Tiny ones only show that a script works."""
    name = f"pallas_kernels.{operation}.served"
    return importlib.import_module(name).cases(is_tiny) if importlib.util.find_spec(name) is not None else []


def random_numbers(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Integers over the whole int8 range but its least, or normal floats."""
    if dtype == "int8":
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def products(is_tiny: bool, sizes: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
    """Products of so many rows with the largest matrices: (name, rows, outputs, inputs)."""
    if is_tiny:
        return [("small", 16, 64, 128)]
    return [(name, rows, outputs, inputs) for rows in sizes for name, (outputs, inputs) in (("gate_up", GATE_UP), ("down", DOWN))]
