"""The KV cache on the device: one K and one V array per layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxinfer import sharding
from jaxinfer.kv.groups import KVGroupSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer; block 0 is the trash block, where padding is written."""

    keys: Any
    """Float[Array, "K N S D"], or its ShapeDtypeStruct before it is allocated."""
    values: Any


def layer_shapes(groups: Sequence[KVGroupSpec], num_blocks: Sequence[int], block_size: int, mesh: Mesh) -> list[LayerKV]:
    """ShapeDtypeStructs of every layer's arrays, layers in order; `num_blocks[g]` usable blocks beside the trash block."""
    pool = NamedSharding(mesh, sharding.spec("kv_heads", None, None, None))
    shapes: dict[int, LayerKV] = {}
    for group, count in zip(groups, num_blocks, strict=True):
        arrays = {
            tensor.name: jax.ShapeDtypeStruct(
                (tensor.num_heads, count + 1, block_size, tensor.head_dim), jnp.dtype(tensor.dtype), sharding=pool
            )
            for tensor in group.tensors
        }
        shapes |= {layer: LayerKV(arrays["keys"], arrays["values"]) for layer in group.layers}
    return [shapes[layer] for layer in sorted(shapes)]


def allocate(shapes: list[LayerKV]) -> list[LayerKV]:
    """Zeroed arrays: `jnp.empty` is really uninitialised, and NaN in an unread slot is still NaN after a product."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype, device=shape.sharding), shapes)
