"""How a module says where its weight comes from and how it is stored."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint under its Hugging Face name, or a part of it.

    Read in this order: expert, transposition, rows, copies.
    """

    name: str
    rows: tuple[int, int, int] | None = None
    """Start, stop and step on axis 0; None is all of it."""
    is_transposed: bool = False
    """Stored [in, out], as GPT-2's Conv1D is."""
    expert: int | None = None
    """Index on axis 0 of a tensor that stacks the experts."""
    copies: tuple[int, int] | None = None
    """(rows of a head, times): every head stands so many times, its copies one after the other."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Where a parameter comes from and how it lies on the mesh.

    Several sources are fused along axis 0 shard-major: each device's part holds that device's piece of every source, one
    after the other, so that a split after the product never moves data between devices.
    """

    sources: tuple[Source | str, ...]
    """A string is a whole tensor."""
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis of each dimension, see `sharding.RULES`."""
    is_quantizable: bool = False
    num_stacked: int = 0
    """X: the sources are X runs of equal length, each is fused for itself, and the results are stacked: [X N K]."""

    @property
    def parts(self) -> list[Source]:
        """The sources, whole tensors too, as `Source`."""
        return [Source(source) if isinstance(source, str) else source for source in self.sources]


def param(spec: WeightSpec, dtype: jnp.dtype) -> nnx.Param:
    """A parameter with a shape and no memory; `checkpoints.load` fills it."""
    return nnx.Param(jax.ShapeDtypeStruct(spec.shape, dtype), spec=spec)
