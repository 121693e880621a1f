"""Products with weights, split over the tensor axis by columns or by rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxinfer import sharding
from jaxinfer.layers.weights import Source, WeightSpec, param
from jaxinfer.quant import weight as quant

Sources = tuple[Source | str, ...]


def weight_specs(weight: object, partition: PartitionSpec) -> object:
    """The specs of a weight's parts: one for a plain array, a pytree of them for a quantized one."""
    return weight.specs(partition) if isinstance(weight, quant.QuantizedWeight) else partition


class ColumnLinear(nnx.Module):
    """x @ weight.T + bias with the output features on the tensor axis; no communication.

    `sources` with the same split may be fused: the result then holds each device's pieces of all of them in turn, and
    `split` takes them apart. `biases` belong to the sources one by one.
    """

    def __init__(
        self, sources: Sources, sizes: tuple[int, ...], num_in: int, *, axis: str, mesh: Mesh, dtype: jnp.dtype, biases: Sources = ()
    ):
        self.weight = param(WeightSpec(sources, (sum(sizes), num_in), (axis, None), is_quantizable=True), dtype)
        if biases:
            self.bias = param(WeightSpec(biases, (sum(sizes),), (axis,)), dtype)
        self.has_bias = bool(biases)
        self.sizes = sizes
        self.axis = axis
        self.mesh = mesh

    def __call__(self, x: Float[Array, "T K"]) -> Float[Array, "T N"]:
        """The product; N lies on the tensor axis."""
        weight = self.weight.get_value()
        partition = sharding.spec(self.axis, None)
        product = jax.shard_map(
            quant.matmul,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), weight_specs(weight, partition)),
            out_specs=sharding.spec(None, self.axis),
            check_vma=False,  # kernels in C++ do not say over which axes their results vary
        )
        result = product(x, weight)
        return result + self.bias.get_value()[None, :] if self.has_bias else result

    def split(self, fused: Float[Array, "T N"]) -> list[Float[Array, "T n"]]:
        """The product's part for each source, every one still split over the tensor axis."""
        num_shards = self.mesh.shape[sharding.TENSOR]
        per_shard = fused.reshape(fused.shape[0], num_shards, -1)
        parts, start = [], 0
        for size in self.sizes:
            width = size // num_shards
            parts.append(per_shard[:, :, start : start + width].reshape(fused.shape[0], size))
            start += width
        return parts


class RowLinear(nnx.Module):
    """x @ weight.T + bias with the input features on the tensor axis; one all-reduce."""

    def __init__(
        self,
        source: Source | str,
        num_out: int,
        num_in: int,
        *,
        axis: str,
        mesh: Mesh,
        dtype: jnp.dtype,
        bias: Source | str | None = None,
    ):
        spec = WeightSpec((source,), (num_out, num_in), (None, axis), is_quantizable=True)
        self.weight = param(spec, dtype)
        if bias is not None:
            self.bias = param(WeightSpec((bias,), (num_out,), (None,)), dtype)
        self.has_bias = bias is not None
        self.axis = axis
        self.mesh = mesh

    def __call__(self, x: Float[Array, "T K"]) -> Float[Array, "T N"]:
        """The sum of all devices' products, on every device."""
        weight = self.weight.get_value()
        product = jax.shard_map(
            _reduced_matmul,
            mesh=self.mesh,
            in_specs=(sharding.spec(None, self.axis), weight_specs(weight, sharding.spec(None, self.axis))),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        result = product(x, weight)
        return result + self.bias.get_value()[None, :] if self.has_bias else result


def _reduced_matmul(x: Float[Array, "T K"], weight: object) -> Float[Array, "T N"]:
    return lax.psum(quant.matmul(x, weight), sharding.TENSOR)
