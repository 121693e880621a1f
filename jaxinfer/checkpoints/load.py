"""Tensors of a checkpoint -> parameters of a model, one tensor at a time, straight onto the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxinfer import sharding
from jaxinfer.checkpoints.source import Checkpoint
from jaxinfer.errors import CheckpointError
from jaxinfer.layers.weights import WeightSpec
from jaxinfer.quant.weight import QuantizedWeight


def declare_parameters(model: nnx.Module, mesh: Mesh, quantization: type[QuantizedWeight] | None) -> list[WeightSlot]:
    """Give every parameter the shapes, dtypes and shardings that it will have, so that programs can be compiled.

    Returns what `load_parameters` fills.
    """
    slots = []
    for module, name, param in list(_parameters(model)):
        spec: WeightSpec = param.get_metadata()["spec"]
        struct = param.get_value()
        if quantization is not None and spec.is_quantizable:
            value = quantization.abstract(spec.shape)
            partitions = value.specs(sharding.spec(*spec.axes))
        else:
            value, partitions = struct, sharding.spec(*spec.axes)
        # A fresh Param without the spec: layers of one structure must compare equal, for they are traced once.
        setattr(module, name, nnx.Param(sharding.struct(mesh, value, partitions)))
        slots.append(WeightSlot(module, name, spec, struct.dtype))
    for module, name, variable in list(_variables(model)):
        if isinstance(variable.get_value(), np.ndarray):
            setattr(module, name, nnx.Variable(sharding.put(mesh, variable.get_value(), sharding.spec())))
    return slots


def load_parameters(
    slots: list[WeightSlot],
    checkpoint: Checkpoint,
    mesh: Mesh,
    quantization: type[QuantizedWeight] | None,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Read every parameter, one at a time, and put it on the mesh; `on_tensor(done, total)` after each.

    All names and shapes are checked before the first weight is read.

    Raises:
        CheckpointError: naming the tensor that is missing or of another shape.
    """
    for slot in slots:
        _check_sources(slot.spec, checkpoint)
    for done, slot in enumerate(slots):
        weight = _fuse(slot.spec, checkpoint, mesh.shape[sharding.TENSOR])
        partition = sharding.spec(*slot.spec.axes)
        if quantization is not None and slot.spec.is_quantizable:
            quantized = quantization.from_float(weight)
            value = sharding.put(mesh, quantized, quantized.specs(partition))
        else:
            value = sharding.put(mesh, weight.astype(slot.dtype), partition)
        setattr(slot.module, slot.name, nnx.Param(value))
        on_tensor(done + 1, len(slots))


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where a parameter goes: an attribute of a module."""

    module: nnx.Module
    name: str
    spec: WeightSpec
    dtype: np.dtype


def _variables(model: nnx.Module) -> Iterator[tuple[nnx.Module, str, nnx.Variable]]:
    for _, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Variable):
                yield module, name, value


def _parameters(model: nnx.Module) -> Iterator[tuple[nnx.Module, str, nnx.Param]]:
    return ((module, name, value) for module, name, value in _variables(model) if isinstance(value, nnx.Param))


def _check_sources(spec: WeightSpec, checkpoint: Checkpoint) -> None:
    shapes = []
    for source in spec.sources:
        if source not in checkpoint.tensors:
            hint = "; config.json says tie_word_embeddings is false" if source == "lm_head.weight" else ""
            raise CheckpointError(f"this tensor is missing{hint}", file=str(checkpoint.path), field=source)
        shapes.append(checkpoint.tensors[source].shape)
        if len(shapes[-1]) != len(spec.shape) or shapes[-1][1:] != spec.shape[1:]:
            raise CheckpointError(
                f"its shape is {list(shapes[-1])} where config.json asks for {list(spec.shape)}", file=str(checkpoint.path), field=source
            )
    total = sum(shape[0] for shape in shapes)
    if total != spec.shape[0]:
        raise CheckpointError(
            f"{total} rows where config.json asks for {spec.shape[0]}", file=str(checkpoint.path), field=" + ".join(spec.sources)
        )


def _fuse(spec: WeightSpec, checkpoint: Checkpoint, num_shards: int) -> np.ndarray:
    """The sources in one matrix, shard-major: every device's piece of each source, one device after the other."""
    tensors = [checkpoint.tensors[source].read() for source in spec.sources]
    if len(tensors) == 1:
        return np.asarray(tensors[0])
    pieces = [np.split(tensor, num_shards) for tensor in tensors]
    return np.concatenate([piece[shard] for shard in range(num_shards) for piece in pieces])
