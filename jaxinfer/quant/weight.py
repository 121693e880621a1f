"""The two things a model does with a weight, whatever it is stored as."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.errors import ConfigError
from pallas_kernels import grouped_matmul as grouped
from pallas_kernels.common.dispatch import Operation

FLOAT32 = jnp.dtype(jnp.float32)


@runtime_checkable
class QuantizedWeight(Protocol):
    """A pytree that stands for a float matrix [N K]. One file in this package per implementation.

    Every array has the rows, N, on axis 0, so that rows are cut, joined and reordered array by array. A stack of matrices
    [X N K] has one axis more in front; it has no `matmul` and no `rows` before an index takes that axis away.
    """

    @property
    def min_rows(self) -> int:
        """Rows of x from which on a row's product has the same bits whatever their number, and is not slow for its size."""
        ...

    def specs(self, spec: PartitionSpec) -> Self:
        """The partition spec of each part when the matrix itself has `spec`."""
        ...

    def matmul(self, x: Float[Array, "M K"], dtype: jnp.dtype = FLOAT32) -> Float[Array, "M N"]:
        """x @ self.T, summed in float32 or wider, given in `dtype`."""
        ...

    def grouped_matmul(self, x: Float[Array, "A U K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
        """x[a] @ self[tile_expert[a]].T of a stack, zeros where the expert is past the end, in one kernel.

        Raises:
            UnsupportedByKernel: there is none for it here.
        """
        ...

    def rows(self, ids: Int32[Array, "T"]) -> Float[Array, "T K"]:
        """The rows `ids` in float32."""
        ...

    def dequantize(self) -> np.ndarray:
        """The float32 matrix, or stack, on the host."""
        ...


class Method(Protocol):
    """A way to quantize float matrices, with its options chosen."""

    def from_float(self, weight: np.ndarray) -> QuantizedWeight:
        """Quantize a matrix [N K], or a stack [X N K], on the host; the parts are numpy arrays."""
        ...

    def abstract(self, shape: tuple[int, ...]) -> QuantizedWeight:
        """What `from_float` gives for this shape, as ShapeDtypeStructs."""
        ...

    def accepts(self, shape: tuple[int, ...], num_shards: int) -> bool:
        """Whether a matrix of this shape can be quantized when its inputs, K, are split over `num_shards` devices."""
        ...


def method(name: str, group_size: int = 32, zero_point: bool = False) -> Method | None:
    """The quantization method of that name; None for "none". Groups and zero points are options of int4.

    Raises:
        ConfigError: no method of this name in the package.
    """
    if name == "none":
        return None
    try:
        make_method = importlib.import_module(f"jaxinfer.quant.{name}").make_method
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"--quantization {name} does not exist", option="--quantization") from error
    return make_method(group_size, zero_point)


PLAIN_MIN_ROWS = 8
"""As `QuantizedWeight.min_rows`, for floats multiplied by XLA: on a CPU its product of one row adds in another order."""


def min_rows(weight: Any) -> int:
    """`QuantizedWeight.min_rows` of a plain or quantized weight."""
    return weight.min_rows if isinstance(weight, QuantizedWeight) else PLAIN_MIN_ROWS


def matmul(x: Float[Array, "M K"], weight: Any, dtype: jnp.dtype | None = None) -> Float[Array, "M N"]:
    """x @ weight.T for a plain or quantized weight [N K], accumulated in float32 or wider, given in `dtype` or in x's."""
    dtype = jnp.dtype(dtype or x.dtype)
    if isinstance(weight, QuantizedWeight):
        return weight.matmul(x, dtype)
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def grouped_matmul(x: Float[Array, "A U K"], weight: Any, tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
    """x[a] @ weight[tile_expert[a]].T for a stack of plain or quantized weights [X N K], see `pallas_kernels.grouped_matmul`.

    A quantized one without a kernel for it is multiplied tile by tile, by its own product and only as many tiles as are used.
    """
    if not isinstance(weight, QuantizedWeight):
        return grouped.grouped_matmul(x, weight, tile_expert)
    return _GROUPED(weight, x, tile_expert)


def _tile_by_tile(weight: Any, x: Float[Array, "A U K"], tile_expert: Int32[Array, "A"]) -> Float32[Array, "A U N"]:
    def product(tile: Int32[Array, ""]) -> Float32[Array, "U N"]:
        of_tile = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, tile_expert[tile], keepdims=False), weight)
        return matmul(lax.dynamic_index_in_dim(x, tile, keepdims=False), of_tile, jnp.dtype(jnp.float32))

    def add_tile(tile: Int32[Array, ""], output: Float32[Array, "A U N"]) -> Float32[Array, "A U N"]:
        return lax.dynamic_update_index_in_dim(output, product(tile), tile, axis=0)

    shape = jax.eval_shape(product, jax.ShapeDtypeStruct((), jnp.int32)).shape
    num_used = jnp.sum(tile_expert < jax.tree.leaves(weight)[0].shape[0], dtype=jnp.int32)
    return lax.fori_loop(0, num_used, add_tile, grouped.zeros_after(num_used, (x.shape[0], *shape)))


_GROUPED = Operation(
    name="grouped product of quantized weights",
    implementations={"kernel": lambda weight, x, tile_expert: weight.grouped_matmul(x, tile_expert), "tiles": _tile_by_tile},
)


def rows(weight: Any, ids: Int32[Array, "T"]) -> Float[Array, "T K"]:
    """weight[ids] for a plain or quantized weight; ids past the end give rows of zeros."""
    if isinstance(weight, QuantizedWeight):
        return weight.rows(ids)
    return weight.at[ids].get(mode="fill", fill_value=0)
