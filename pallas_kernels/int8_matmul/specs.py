"""Named argument sets of the int8 product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_ROW_ERROR = 5e-5
"""The integer product is exact and scales round in float32 (1e-7); with two terms a quotient at the middle between two
steps may round either way, which is 1 / 254 of a step of one input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """M rows, N outputs, K inputs."""

    name: str
    num_rows: int
    num_outputs: int
    num_inputs: int
    num_terms: int = 1


SPECS = (
    Spec(name="one_row", num_rows=1, num_outputs=96, num_inputs=64),
    Spec(name="seven_rows", num_rows=7, num_outputs=33, num_inputs=50),
    Spec(name="decode", num_rows=32, num_outputs=960, num_inputs=576),
    Spec(name="two_terms_one_row", num_rows=1, num_outputs=96, num_inputs=64, num_terms=2),
    Spec(name="two_terms", num_rows=40, num_outputs=576, num_inputs=1536, num_terms=2),
)


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Activations with outliers, a row of zeros where there are several, weights over the whole int8 range."""
    draws = np.random.default_rng(seed)
    x = draws.standard_normal((spec.num_rows, spec.num_inputs)).astype(np.float32)
    x[:, 0] *= 40
    if spec.num_rows > 1:
        x[1] = 0
    weight = draws.integers(-127, 128, (spec.num_outputs, spec.num_inputs)).astype(np.int8)
    scale = draws.uniform(0.001, 0.1, spec.num_outputs).astype(np.float32)
    return {"x": x, "weight": weight, "weight_scale": scale}
