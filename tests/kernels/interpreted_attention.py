"""Paged attention's Mosaic kernels in the interpreter, and what they have to give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import interpreter
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.specs import Spec, static_arguments
from tests.kernels import oracles


def run(spec: Spec, arguments: dict[str, Any], *, detect_races: bool = True) -> tuple[np.ndarray, interpreter.Run]:
    """Interpreted with memory that starts as NaN; float32."""
    with interpreter.interpreted(detect_races=detect_races) as counted:
        call = jax.jit(lambda kwargs: mosaic.paged_attention(**kwargs, **static_arguments(spec), interpret=True))
        output = np.asarray(call(jax.tree.map(jnp.asarray, arguments)), np.float32)
    return output, counted


def expect(spec: Spec, arguments: dict[str, Any]) -> np.ndarray:
    """The oracle's rows that are no padding."""
    return oracles.paged_attention(**arguments, **static_arguments(spec))[: sum(queries for queries, _ in spec.rows)]
