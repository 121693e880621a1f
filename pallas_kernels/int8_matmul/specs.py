"""Named argument sets of the int8 product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

MAX_ROW_ERROR = 5e-5
"""The integer product is exact and scales round in float32 (1e-7); with two terms a quotient at the middle between two
steps may round either way, which is 1 / 254 of a step of one input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """M rows, N outputs, K inputs.

    Attributes:
        dtype: of x, bias and result; sums and scales are float32 in any case.
    """

    name: str
    num_rows: int
    num_outputs: int
    num_inputs: int
    num_terms: int = 1
    has_bias: bool = False
    activation: str | None = None
    dtype: str = "float32"


SPECS = (
    Spec(name="one_row", num_rows=1, num_outputs=96, num_inputs=64),
    Spec(name="seven_rows", num_rows=7, num_outputs=33, num_inputs=50),
    Spec(name="decode", num_rows=32, num_outputs=960, num_inputs=576),
    Spec(name="two_terms_one_row", num_rows=1, num_outputs=96, num_inputs=64, num_terms=2),
    Spec(name="two_terms", num_rows=40, num_outputs=576, num_inputs=1536, num_terms=2),
    Spec(name="bias", num_rows=3, num_outputs=72, num_inputs=64, has_bias=True),
    Spec(name="silu", num_rows=9, num_outputs=72, num_inputs=64, activation="silu"),
    Spec(name="bias_gelu", num_rows=9, num_outputs=72, num_inputs=64, num_terms=2, has_bias=True, activation="gelu"),
    Spec(name="gelu_tanh", num_rows=9, num_outputs=72, num_inputs=64, activation="gelu_tanh"),
    Spec(name="bias_silu_bfloat16", num_rows=9, num_outputs=72, num_inputs=64, has_bias=True, activation="silu", dtype="bfloat16"),
)


MOSAIC_SPECS = (
    Spec(name="one_row", num_rows=1, num_outputs=96, num_inputs=128),
    Spec(name="rows_and_outputs_beyond_tiles", num_rows=11, num_outputs=88, num_inputs=96),
    Spec(name="two_terms", num_rows=5, num_outputs=72, num_inputs=384, num_terms=2),
    Spec(name="bias_gelu", num_rows=3, num_outputs=64, num_inputs=160, num_terms=2, has_bias=True, activation="gelu"),
    Spec(name="bias_silu_bfloat16", num_rows=9, num_outputs=136, num_inputs=256, has_bias=True, activation="silu", dtype="bfloat16"),
    Spec(name="two_tiles_of_rows", num_rows=40, num_outputs=64, num_inputs=192, activation="gelu_tanh"),
)
"""Small enough for an interpreter of kernels."""


def static_arguments(spec: Spec) -> dict[str, Any]:
    """What is not an array."""
    return {"num_terms": spec.num_terms, "activation": spec.activation, "out_dtype": spec.dtype}


def make_arguments(spec: Spec, seed: int = 0) -> dict[str, np.ndarray]:
    """Activations with outliers, a row of zeros where there are several, weights over the whole int8 range."""
    draws = np.random.default_rng(seed)
    x = draws.standard_normal((spec.num_rows, spec.num_inputs)).astype(np.float32)
    x[:, 0] *= 40
    if spec.num_rows > 1:
        x[1] = 0
    weight = draws.integers(-127, 128, (spec.num_outputs, spec.num_inputs)).astype(np.int8)
    # An activation is put to the test by results of its own size.
    scale = draws.uniform(0.001, 0.1, spec.num_outputs).astype(np.float32) * np.float32(1 if spec.activation is None else 1 / 32)
    dtype = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else np.float32
    arguments = {"x": x.astype(dtype), "weight": weight, "weight_scale": scale}
    return arguments | ({"bias": draws.standard_normal(spec.num_outputs).astype(dtype)} if spec.has_bias else {})
