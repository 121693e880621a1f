"""The feed-forward part of a block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxinfer.layers.linear import ColumnLinear, RowLinear


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202), gate and up fused, F on the tensor axis."""

    def __init__(self, name: str, *, size: int, hidden_size: int, mesh: Mesh, dtype: jnp.dtype):
        sources = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
        self.gate_up = ColumnLinear(sources, (hidden_size, hidden_size), size, axis="mlp", mesh=mesh, dtype=dtype)
        self.down = RowLinear(f"{name}.down_proj.weight", size, hidden_size, axis="mlp", mesh=mesh, dtype=dtype)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """One all-reduce, in `down`."""
        gate, up = self.gate_up.split(self.gate_up(x))
        return self.down(jax.nn.silu(gate) * up)
