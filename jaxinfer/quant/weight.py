"""The two things a model does with a weight, whatever it is stored as."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, Self, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxinfer.errors import ConfigError


@runtime_checkable
class QuantizedWeight(Protocol):
    """A pytree that stands for a float matrix [N K]. One file in this package per implementation."""

    @classmethod
    def from_float(cls, weight: np.ndarray) -> Self:
        """Quantize on the host; the parts are numpy arrays."""
        ...

    @classmethod
    def abstract(cls, shape: tuple[int, ...]) -> Self:
        """The same parts as ShapeDtypeStructs."""
        ...

    def specs(self, spec: PartitionSpec) -> Self:
        """The partition spec of each part when the matrix itself has `spec`."""
        ...

    def matmul(self, x: Float[Array, "M K"]) -> Float[Array, "M N"]:
        """x @ self.T in float32."""
        ...

    def rows(self, ids: Int32[Array, "T"]) -> Float[Array, "T K"]:
        """The rows `ids` in float32."""
        ...


def method(name: str) -> type[QuantizedWeight] | None:
    """The type of a quantization method; None for "none".

    Raises:
        ConfigError: no file of this name in the package.
    """
    if name == "none":
        return None
    try:
        return importlib.import_module(f"jaxinfer.quant.{name}").WEIGHT
    except ModuleNotFoundError as error:
        raise ConfigError(f"--quantization {name} does not exist", option="--quantization") from error


def matmul(x: Float[Array, "M K"], weight: Any) -> Float[Array, "M N"]:
    """x @ weight.T for a plain or quantized weight [N K], in x's dtype, accumulated in float32 or wider."""
    if isinstance(weight, QuantizedWeight):
        return weight.matmul(x).astype(x.dtype)
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)


def rows(weight: Any, ids: Int32[Array, "T"]) -> Float[Array, "T K"]:
    """weight[ids] for a plain or quantized weight; ids past the end give rows of zeros."""
    if isinstance(weight, QuantizedWeight):
        return weight.rows(ids)
    return weight.at[ids].get(mode="fill", fill_value=0)
