"""Attention of a ragged batch of queries over keys and values that lie in blocks."""

from pallas_kernels.paged_attention.api import OPERATION, paged_attention

__all__ = ["OPERATION", "paged_attention"]
