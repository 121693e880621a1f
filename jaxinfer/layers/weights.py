"""How a module says where its weight comes from and how it is stored."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Where a parameter comes from and how it lies on the mesh.

    `sources` are tensors of the checkpoint under Hugging Face names. Several of them are fused along axis 0
    shard-major: each device's part holds that device's piece of every source, one after the other, so that a split
    after the product never moves data between devices.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis of each dimension, see `sharding.RULES`."""
    is_quantizable: bool = False


def param(spec: WeightSpec, dtype: jnp.dtype) -> nnx.Param:
    """A parameter with a shape and no memory; `checkpoints.load` fills it."""
    return nnx.Param(jax.ShapeDtypeStruct(spec.shape, dtype), spec=spec)
