"""Products of tiles of rows, each with its own expert's weight."""

from pallas_kernels.grouped_matmul.api import OPERATION, grouped_matmul
from pallas_kernels.grouped_matmul.xla import zeros_after

__all__ = ["OPERATION", "grouped_matmul", "zeros_after"]
