"""Products of activations with int8 weights."""

from pallas_kernels.int8_matmul.api import OPERATION, int8_matmul, quantize_rows

__all__ = ["OPERATION", "int8_matmul", "quantize_rows"]
