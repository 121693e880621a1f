"""Products of activations with matrices kept as small integers and scales."""

from pallas_kernels.common.mosaic import late
from pallas_kernels.packed_matmul.api import OPERATION, packed_matmul
from pallas_kernels.packed_matmul.matrix import RUN, PackedMatrix
from pallas_kernels.packed_matmul.reference import dequantize

__all__ = ["OPERATION", "RUN", "PackedMatrix", "dequantize", "grouped_packed_matmul", "packed_matmul"]

grouped_packed_matmul = late("pallas_kernels.packed_matmul.mosaic.grouped", "grouped_packed_matmul")
