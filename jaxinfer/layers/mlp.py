"""The feed-forward part of a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.layers.linear import ColumnLinear, RowLinear
from jaxinfer.layers.weights import Source

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPWeights:
    """Where an MLP's weights come from: `up` is gate and up of a gated one; biases of each, or none."""

    up: tuple[Source | str, ...]
    down: Source | str
    up_bias: tuple[Source | str, ...] = ()
    down_bias: Source | str | None = None


def gated_weights(name: str, *, has_bias: bool = False) -> MLPWeights:
    """Hugging Face's usual names."""
    return MLPWeights(
        up=(f"{name}.gate_proj.weight", f"{name}.up_proj.weight"),
        down=f"{name}.down_proj.weight",
        up_bias=(f"{name}.gate_proj.bias", f"{name}.up_proj.bias") if has_bias else (),
        down_bias=f"{name}.down_proj.bias" if has_bias else None,
    )


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202), gate and up fused; with one matrix before the activation down(act(up(x))).

    F lies on the tensor axis.
    """

    def __init__(self, weights: MLPWeights, *, size: int, hidden_size: int, activation: Activation, mesh: Mesh, dtype: jnp.dtype):
        sizes = (hidden_size,) * len(weights.up)
        self.up = ColumnLinear(weights.up, sizes, size, axis="mlp", mesh=mesh, dtype=dtype, biases=weights.up_bias)
        self.down = RowLinear(weights.down, size, hidden_size, axis="mlp", mesh=mesh, dtype=dtype, bias=weights.down_bias)
        self.activation = activation

    def __call__(self, x: Float[Array, "T E"], batch: ForwardBatch | None = None) -> Float[Array, "T E"]:
        """One all-reduce, in `down`. `batch` is for MLPs that treat tokens unlike each other, which this one does not."""
        first, *rest = self.up.split(self.up(x))
        hidden = ACTIVATIONS[self.activation](first)
        return self.down(hidden * rest[0] if rest else hidden)
