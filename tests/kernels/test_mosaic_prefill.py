"""Attention of rows with several queries in Mosaic GPU, in the interpreter: numbers, races, bits; and broken forms, which must be noticed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import interpreter
from pallas_kernels.common.compare import row_error
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.specs import PREFILL_SPECS, Spec, make_arguments, static_arguments
from tests.kernels import oracles

pytestmark = pytest.mark.kernels

BY_NAME = {spec.name: spec for spec in PREFILL_SPECS}


def run(spec: Spec, arguments: dict[str, Any], *, detect_races: bool = True) -> tuple[np.ndarray, interpreter.Run]:
    """Interpreted with memory that starts as NaN; float32."""
    with interpreter.interpreted(detect_races=detect_races) as counted:
        call = jax.jit(lambda kwargs: mosaic.paged_attention(**kwargs, **static_arguments(spec), interpret=True))
        output = np.asarray(call(jax.tree.map(jnp.asarray, arguments)), np.float32)
    return output, counted


def expect(spec: Spec, arguments: dict[str, Any]) -> np.ndarray:
    """The oracle's rows that are no padding."""
    return oracles.paged_attention(**arguments, **static_arguments(spec))[: sum(queries for queries, _ in spec.rows)]


@pytest.mark.parametrize("name", BY_NAME)
def test_output_equals_the_oracle(name: str) -> None:
    spec = BY_NAME[name]
    arguments = make_arguments(spec)
    output, counted = run(spec, arguments)
    expected = expect(spec, arguments)
    assert not output[len(expected) :].any(), "padding must stay finite: the next layer computes with it"
    output = output[: len(expected)]
    assert row_error(output, expected) <= spec.limit
    for broken in (np.zeros_like(output), np.roll(output, 1, axis=-1), np.roll(output, 1, axis=0)):
        assert row_error(broken, expected) > spec.limit, "the comparison would accept a broken kernel"
    assert not counted.has_races
