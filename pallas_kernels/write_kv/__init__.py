"""Writing new keys and values into their blocks."""

from pallas_kernels.write_kv.api import OPERATION, write_kv

__all__ = ["OPERATION", "write_kv"]
