"""Files -> tensors and configuration. Nothing here imports jax."""

from __future__ import annotations

from jaxinfer.checkpoints.resolve import open_checkpoint
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor

__all__ = ["Checkpoint", "LazyTensor", "open_checkpoint"]
