"""The KV cache on the device: one K and one V array per layer, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxinfer import sharding
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from pallas_kernels.common.one_byte import has_scales


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer; block 0 is the trash block, where padding is written."""

    keys: Any
    """Float[Array, "K N S D"], or its ShapeDtypeStruct before it is allocated."""
    values: Any
    """Float[Array, "K N S D"]; None in a latent cache (MLA), where the values are the first columns of the keys."""
    key_scales: Any = None
    """Float32[Array, "K N S"] when the keys are int8 or float8_e4m3fn: one scale per token and head."""
    value_scales: Any = None


def spread_over(groups: Sequence[KVGroupSpec], mesh: Mesh) -> tuple[KVGroupSpec, ...]:
    """The groups as they lie on the mesh, with a head as often as there are devices that keep it (`sharding.kv_head_copies`)."""

    def tensor_on_mesh(tensor: KVTensorSpec) -> KVTensorSpec:
        return replace(tensor, num_heads=tensor.num_heads * sharding.kv_head_copies(tensor.num_heads, mesh.shape[sharding.TENSOR]))

    # A latent has one head, which every device's queries read and which is there once for all.
    return tuple(group if group.kind == "latent" else replace(group, tensors=tuple(map(tensor_on_mesh, group.tensors))) for group in groups)


def layer_shapes(groups: Sequence[KVGroupSpec], num_blocks: Sequence[int], block_size: int, mesh: Mesh) -> list[LayerKV]:
    """ShapeDtypeStructs of every layer's arrays, layers in order; `num_blocks[g]` usable blocks beside the trash block."""
    shapes: dict[int, LayerKV] = {}
    for group, count in zip(groups, num_blocks, strict=True):
        heads = None if group.kind == "latent" else "kv_heads"  # a latent has one head, which every device's queries read
        arrays: dict[str, Any] = {}
        for tensor in group.tensors:
            slots = (tensor.num_heads, count + 1, block_size)
            pool = NamedSharding(mesh, sharding.spec(heads, None, None, None))
            arrays[tensor.name] = jax.ShapeDtypeStruct((*slots, tensor.head_dim), jnp.dtype(tensor.dtype), sharding=pool)
            if has_scales(tensor.dtype):
                scales = NamedSharding(mesh, sharding.spec(heads, None, None))
                arrays[tensor.name + "_scales"] = jax.ShapeDtypeStruct(slots, jnp.float32, sharding=scales)
        layer_kv = LayerKV(arrays["keys"], arrays.get("values"), arrays.get("keys_scales"), arrays.get("values_scales"))
        shapes |= dict.fromkeys(group.layers, layer_kv)
    return [shapes[layer] for layer in sorted(shapes)]


def bytes_per_token(group: KVGroupSpec) -> int:
    """What one token takes in all layers of a group, scales included."""
    per_layer = sum(
        tensor.num_heads * (tensor.head_dim * jnp.dtype(tensor.dtype).itemsize + (4 if has_scales(tensor.dtype) else 0))
        for tensor in group.tensors
    )
    return per_layer * len(group.layers)


def allocate(shapes: list[LayerKV]) -> list[LayerKV]:
    """Zeroed arrays: `jnp.empty` is really uninitialised, and NaN in an unread slot is still NaN after a product."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype, device=shape.sharding), shapes)
