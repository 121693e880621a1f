"""Writing new keys and values into their blocks."""

from pallas_kernels.write_kv.api import OPERATION, write_kv
from pallas_kernels.write_kv.rotated import rotate_and_write_kv

__all__ = ["OPERATION", "rotate_and_write_kv", "write_kv"]
