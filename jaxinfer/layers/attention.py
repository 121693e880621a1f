"""Self-attention over the paged KV cache."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32

from jaxinfer import sharding
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.kv.cache import LayerKV
from jaxinfer.layers.linear import ColumnLinear, RowLinear
from jaxinfer.layers.rope import rotate
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.write_kv import write_kv


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with fused projections, heads on the tensor axis."""

    def __init__(self, name: str, *, size: int, num_heads: int, num_kv_heads: int, head_dim: int, group: int, mesh: Mesh, dtype: jnp.dtype):
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        sources = (f"{name}.q_proj.weight", f"{name}.k_proj.weight", f"{name}.v_proj.weight")
        self.qkv = ColumnLinear(sources, sizes, size, axis="heads", mesh=mesh, dtype=dtype)
        self.out = RowLinear(f"{name}.o_proj.weight", size, sizes[0], axis="heads", mesh=mesh, dtype=dtype)
        self.head_dim = head_dim
        self.group = group
        self.mesh = mesh

    def __call__(
        self, x: Float[Array, "T E"], rotation: Float32[Array, "T D"], kv: LayerKV, batch: ForwardBatch
    ) -> tuple[Float[Array, "T E"], LayerKV]:
        """Write the batch's keys and values, then attend; the cache that goes in is donated."""
        q, k, v = (part.reshape(x.shape[0], -1, self.head_dim) for part in self.qkv.split(self.qkv(x)))
        heads, pool, everywhere = sharding.spec(None, "heads", None), sharding.spec("kv_heads", None, None, None), PartitionSpec()
        attend = jax.shard_map(
            partial(_write_and_attend, scale=self.head_dim**-0.5),
            mesh=self.mesh,
            in_specs=(heads, heads, heads, pool, pool, *[everywhere] * 4),
            out_specs=(heads, pool, pool),
            check_vma=False,  # the attention loop's carry starts equal on all devices and varies later
        )
        attended, keys, values = attend(
            rotate(q, rotation),
            rotate(k, rotation),
            v,
            kv.keys,
            kv.values,
            batch.slot_mapping[self.group],
            batch.block_tables[self.group],
            batch.query_start_loc,
            batch.context_lens,
        )
        return self.out(attended.reshape(x.shape[0], -1)), LayerKV(keys, values)


def _write_and_attend(q, k, v, keys, values, slot_mapping, block_tables, query_start_loc, context_lens, *, scale):
    keys = write_kv(keys, k, slot_mapping)
    values = write_kv(values, v, slot_mapping)
    return paged_attention(q, keys, values, block_tables, query_start_loc, context_lens, scale=scale), keys, values
