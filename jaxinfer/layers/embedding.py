"""Token embedding and the output head, with the vocabulary on the tensor axis."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer import sharding
from jaxinfer.layers.linear import weight_specs
from jaxinfer.layers.weights import WeightSpec, param
from jaxinfer.quant import weight as quant


class Embedding(nnx.Module):
    """A table [V E]: a look-up on the way in, a product on the way out when the model ties the two.

    Args:
        scale: what looked-up vectors are multiplied by, rounded to `dtype` first as Gemma does; the product is not.
    """

    def __init__(self, source: str, vocab_size: int, size: int, *, mesh: Mesh, dtype: jnp.dtype, scale: float = 1.0):
        self.weight = param(WeightSpec((source,), (vocab_size, size), ("vocab", None), is_quantizable=True), dtype)
        self.mesh = mesh
        self.dtype = dtype
        self.scale = scale

    def __call__(self, token_ids: Int32[Array, "T"]) -> Float[Array, "T E"]:
        """Each token's vector; one all-reduce when the table is split."""
        rows = self._sharded(_reduced_rows, PartitionSpec())(token_ids, self.weight.get_value()).astype(self.dtype)
        return rows if self.scale == 1.0 else rows * jnp.asarray(self.scale, self.dtype)

    def logits(self, x: Float[Array, "M E"]) -> Float32[Array, "M V"]:
        """x @ table.T in float32, gathered onto every device."""
        return self._sharded(_gathered_logits, PartitionSpec())(x, self.weight.get_value())

    def _sharded(self, run: Callable[..., Array], out_specs: PartitionSpec) -> Callable[..., Array]:
        parts = weight_specs(self.weight.get_value(), sharding.spec("vocab", None))
        return jax.shard_map(run, mesh=self.mesh, in_specs=(PartitionSpec(), parts), out_specs=out_specs, check_vma=False)


def _reduced_rows(token_ids: Int32[Array, "T"], table: object) -> Float[Array, "T E"]:
    num_rows = jax.tree.leaves(table)[0].shape[0]
    local = token_ids - lax.axis_index(sharding.TENSOR) * num_rows
    # Another device's token: an index past the end, which gives zeros; a negative one would wrap.
    local = jnp.where((local >= 0) & (local < num_rows), local, num_rows)
    return lax.psum(quant.rows(table, local), sharding.TENSOR)


def _gathered_logits(x: Float[Array, "M E"], table: object) -> Float32[Array, "M V"]:
    logits = quant.matmul(x, table, jnp.dtype(jnp.float32))  # bfloat16 would make ties of close ones
    if lax.axis_size(sharding.TENSOR) == 1:
        return logits  # XLA copies them in a gather of one
    return lax.all_gather(logits, sharding.TENSOR, axis=1, tiled=True)
