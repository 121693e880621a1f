"""The public signature of the packed product and its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.common.mosaic import late
from pallas_kernels.packed_matmul import native, reference, xla
from pallas_kernels.packed_matmul.matrix import RUN, PackedMatrix

OPERATION = Operation(
    name="packed_matmul",
    implementations={
        "mosaic": late("pallas_kernels.packed_matmul.mosaic", "packed_matmul"),
        "native": native.packed_matmul,
        "xla": xla.packed_matmul,
        "reference": reference.packed_matmul,
    },
    if_named={"mosaic": {"interpret": True}},
)

__all__ = ["OPERATION", "PackedMatrix", "packed_matmul"]


def packed_matmul(x: Float[Array, "M K"], matrix: PackedMatrix, *, implementation: str | None = None) -> Float32[Array, "M N"]:
    """x @ matrix.T, float activations times a matrix that stays packed, in float32.

    This one operation is W8A16 (int8 or float8 codes) and W4A16 (an int4 product with groups), and what GGUF, GPTQ, AWQ and MXFP4
    files hold: the formats differ in a `PackedMatrix`, not in the call.

    On a CPU activations are float32 throughout; on Hopper GPUs bfloat16 ones are multiplied with codes as they are, which is exact,
    and sums are scaled in float32. In both a row of the result has the same bits whatever the other rows are. What neither takes is
    dequantized to the dtype of x and multiplied with sums in float32.

    Raises:
        ValueError: shapes that do not fit each other, or a number of bits other than 4, 5, 6 and 8.
    """
    _check(x, matrix)
    return OPERATION(x, matrix, implementation=implementation)


def _check(x: Array, m: PackedMatrix) -> None:
    if m.bits not in (4, 5, 6, 8) or (m.codebook is not None and (m.bits != 4 or len(m.codebook) != 16)):
        raise ValueError(f"bits must be 4, 5, 6 or 8, and 4 with a codebook of 16 values, got {m.bits}")
    if len(m.shape) != 2 or x.ndim != 2 or x.shape[1] != m.shape[1]:
        raise ValueError(f"x {x.shape} and the matrix {m.shape} must be [M K] and [N K]")
    num_outputs, num_inputs = m.shape
    num_groups = num_inputs // m.group_size if m.group_size else 1
    expected = {"scales": (num_outputs, num_groups)}
    if m.group_size and num_inputs % m.group_size:
        raise ValueError(f"groups of {m.group_size} must divide {num_inputs} inputs")
    for name in ("offsets", "zeros"):
        expected |= {name: (num_outputs, num_groups)} if getattr(m, name) is not None else {}
    if m.bits != 8:
        expected |= {"codes": (num_outputs, num_inputs // RUN, RUN // 2)}
        expected |= {"high": (num_outputs, num_inputs // RUN, m.bits - 4, RUN // 8)} if m.bits > 4 else {}
    for name, shape in expected.items():
        if getattr(m, name).shape != shape:
            raise ValueError(f"{name} must be {shape} for a matrix {m.shape} in groups of {m.group_size}, got {getattr(m, name).shape}")
    for name in ("super_scales", "super_offsets"):
        large = getattr(m, name)
        if large is not None and (large.shape[0] != num_outputs or num_groups % large.shape[1]):
            raise ValueError(f"{name} {large.shape} do not divide {num_groups} groups of {num_outputs} rows")
