"""Attention of rows with several queries in Mosaic GPU, in the interpreter: numbers, races, bits; and broken forms, which must be noticed."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.common.compare import row_error
from pallas_kernels.paged_attention.specs import PREFILL_SPECS, make_arguments
from tests.kernels.interpreted_attention import expect, run

pytestmark = pytest.mark.kernels

BY_NAME = {spec.name: spec for spec in PREFILL_SPECS}


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
