"""The mesh, and which logical axis of a weight or of the KV cache lies on which axis of the mesh. Decided here, once."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import ConfigError

TENSOR = "tensor"
"""The mesh axis of tensor parallelism."""

RULES: dict[str, str | None] = {
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "embed": None,
}
"""Logical axis -> mesh axis; None is replicated."""


def make_mesh(tensor_parallel_size: int, *, min_cpu_devices: int = 1) -> Mesh:
    """A mesh over the first devices; on a CPU as many virtual devices are made as it takes, and at least `min_cpu_devices`.

    Raises:
        ConfigError: fewer devices than asked for.
    """
    num_devices = max(tensor_parallel_size, min_cpu_devices)
    if num_devices > 1:
        # It is the CPU's number and no GPU's. Refused once the backend of this process is up; what it has is counted below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", max(num_devices, jax.config.jax_num_cpu_devices))
    devices = jax.devices()
    if len(devices) < tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel_size} needs as many devices, found {len(devices)} ({devices[0].device_kind}); "
            "on a CPU virtual devices can only be made before jax is first used",
            option="--tensor-parallel-size",
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TENSOR,), axis_types=(AxisType.Auto,))


def spec(*axes: str | None) -> PartitionSpec:
    """The partition spec of an array whose dimensions have these logical names (None: replicated)."""
    return PartitionSpec(*(RULES[axis] if axis is not None else None for axis in axes))


def put(mesh: Mesh, value: Any, partition: Any) -> Any:
    """Place a host array, or a pytree of them with a matching pytree of specs, onto the mesh."""
    return jax.tree.map(lambda array, part: jax.device_put(array, NamedSharding(mesh, part)), value, partition)


def struct(mesh: Mesh, value: Any, partition: Any) -> Any:
    """ShapeDtypeStructs, one or a pytree of them with a matching pytree of specs, as they would lie on the mesh."""
    return jax.tree.map(
        lambda leaf, part: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, part)), value, partition
    )


def kv_head_copies(num_kv_heads: int, tensor_parallel_size: int) -> int:
    """On how many devices each KV head lies: 1, but where there are fewer heads than devices.

    A head of Qwen3-30B-A3B, which has 4, lies on two of 8 devices, each with its own half of the queries that read it.

    Raises:
        ConfigError: heads and devices of which neither divides the other.
    """
    if tensor_parallel_size % num_kv_heads == 0:
        return tensor_parallel_size // num_kv_heads
    check_divisible("num_key_value_heads", num_kv_heads, tensor_parallel_size)
    return 1


def check_divisible(what: str, size: int, tensor_parallel_size: int) -> None:
    """Refuse a split that leaves a remainder.

    Raises:
        ConfigError: naming what does not divide.
    """
    if size % tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size {tensor_parallel_size} does not divide the model's {what} ({size})",
            option="--tensor-parallel-size",
        )
