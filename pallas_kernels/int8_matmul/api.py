"""The public signature of the int8 product and its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int8

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.int8_matmul import reference, xla
from pallas_kernels.int8_matmul.reference import quantize_rows

OPERATION = Operation(name="int8_matmul", implementations={"xla": xla.int8_matmul, "reference": reference.int8_matmul})

__all__ = ["OPERATION", "int8_matmul", "quantize_rows"]


def int8_matmul(
    x: Float[Array, "M K"],
    weight: Int8[Array, "N K"],
    weight_scale: Float32[Array, "N"],
    *,
    num_terms: int = 1,
    implementation: str | None = None,
) -> Float32[Array, "M N"]:
    """x @ (weight * weight_scale[:, None]).T with x rounded to int8 per row (W8A8), in float32.

    Each row of x is scaled so that its largest magnitude is 127 and rounded half to even; the product is exact in
    int32, then scaled by both scales. The result of a row therefore depends on that row alone, to the bit.

    With `num_terms` 2 the rounding error is rounded to int8 in turn and multiplied too: activations of about 15 bits at
    the price of twice the rows. Inputs with outliers need it (SmolLM2: KL 0.069 against float32 with one term, 0.010 with
    two), and a product of few rows is bound by reading the weight, which is still read once.

    Raises:
        ValueError: shapes that do not fit each other, or a number of terms other than 1 and 2.
    """
    if num_terms not in (1, 2):
        raise ValueError(f"num_terms must be 1 or 2, got {num_terms}")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or weight_scale.shape != weight.shape[:1]:
        raise ValueError(f"x {x.shape}, weight {weight.shape} and weight_scale {weight_scale.shape} must be [M K], [N K] and [N]")
    return OPERATION(x, weight, weight_scale, num_terms=num_terms, implementation=implementation)
