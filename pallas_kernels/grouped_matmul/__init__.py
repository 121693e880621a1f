"""Products of tiles of rows, each with its own expert's weight."""

from pallas_kernels.grouped_matmul.api import OPERATION, grouped_matmul

__all__ = ["OPERATION", "grouped_matmul"]
