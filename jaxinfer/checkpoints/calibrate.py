"""Quantizing a checkpoint's matrices for the inputs that they get from real text.

The model runs in floats, one layer after the other. A layer runs twice: first the second moments of what enters each of its
matrices are summed, then, with the matrices as they will be stored, it gives the next layer its inputs. So every layer is
quantized for what the quantized layers before it give, and one layer's weights are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxinfer import sharding
from jaxinfer.checkpoints.load import Storage, WeightSlot, declare_parameters, load_parameters
from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.checkpoints.quantize import quantizable_names
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor
from jaxinfer.errors import ConfigError
from jaxinfer.forward_batch import ForwardBatch
from jaxinfer.kv.cache import LayerKV, allocate, layer_shapes
from jaxinfer.kv.groups import ceil_div
from jaxinfer.layers.linear import ColumnLinear, RowLinear
from jaxinfer.models.config import find
from jaxinfer.quant.gptq import from_moments
from jaxinfer.quant.int4 import Int4
from jaxinfer.quant.packed import PackedWeight

BLOCK_SIZE = 16
"""Slots of a block of the KV cache, in which a window lies as a request does."""

Windows = Sequence[Sequence[int]]
"""Token ids, all windows of one length."""


def calibrate(checkpoint: Checkpoint, storage: Storage, windows: Windows) -> dict[str, PackedWeight]:
    """The matrices of the model's layers by their tensors' names, quantized for the text in `windows`.

    Not among them, to be rounded to nearest: the vocabulary's matrices, experts, and what the method does not accept.

    Raises:
        ConfigError: another method than int4, windows longer than the model's context, or no matrix that could be calibrated.
        CheckpointError, UnsupportedModelError: the model's files.
    """
    if not isinstance(storage.method, Int4):
        raise ConfigError("--calibrate needs --quantization int4", option="--calibrate")
    mesh = sharding.make_mesh(1)
    model, slots, caches, batch = _declare(checkpoint, mesh, len(windows[0]))
    names = _names(slots, checkpoint, storage.method)
    total = sum(4 * prod(checkpoint.tensors[name].shape) for of_module in names.values() for name in of_module)
    if not total:
        raise ConfigError(f"--calibrate: {checkpoint.name} has no matrix that could be calibrated", option="--calibrate")
    found: dict[str, PackedWeight] = {}
    done = 0
    with byte_progress("calibrating", total) as show, jax.default_matmul_precision("highest"):
        states, rotation = _embed(model, slots, checkpoint, mesh, windows, batch)
        for layer, cache in zip(model.layers, allocate(caches), strict=True):
            own = _slots_in([layer], slots)
            load_parameters(own, checkpoint, mesh)
            moments = _record(layer, [(x, rotation, cache, batch) for x in states])
            for key, of_inputs in moments.items():
                if names.get(key):
                    quantized = _quantize(storage.method, {name: checkpoint.tensors[name] for name in names[key]}, of_inputs)
                    done += sum(4 * prod(checkpoint.tensors[name].shape) for name in quantized)
                    found |= quantized
                    show(done)
            load_parameters([slot for slot in own if id(slot.module) in moments], _with(checkpoint, found), mesh)
            states = [_run_layer(*nnx.split(layer), x, rotation, cache, batch) for x in states]
            _drop(own, mesh)
    return found


def _quantize(method: Int4, tensors: Mapping[str, LazyTensor], moments: np.ndarray) -> dict[str, PackedWeight]:
    """Matrices that have their inputs in common, as one: rows do not see each other."""
    matrices = [np.asarray(tensor.read(), np.float32) for tensor in tensors.values()]
    ends = np.cumsum([len(matrix) for matrix in matrices]).tolist()
    whole = from_moments(method, np.concatenate(matrices), moments)
    return {
        name: jax.tree.map(lambda leaf, rows=slice(start, end): leaf[rows], whole)
        for name, start, end in zip(tensors, [0, *ends], ends, strict=False)
    }


def _declare(checkpoint: Checkpoint, mesh: Mesh, length: int) -> tuple[Any, list[WeightSlot], list[LayerKV], ForwardBatch]:
    """The model in float32 without its weights, what fills it, and caches and batch of one window."""
    file = str(checkpoint.path)
    architecture = find(checkpoint.config, file)
    config = architecture.Config.from_hf(checkpoint.config, file)
    if length > config.max_positions:
        raise ConfigError(
            f"--calibrate reads windows of {length} tokens, the model's context is {config.max_positions}", option="--calibrate"
        )
    model: Any = architecture.Model(config, mesh, jnp.dtype(jnp.float32), length)
    slots = declare_parameters(model, mesh, checkpoint, Storage(), config.unused_tensors)
    groups = architecture.kv_groups(config, "float32")
    caches = layer_shapes(groups, [ceil_div(length, BLOCK_SIZE)] * len(groups), BLOCK_SIZE, mesh)
    return model, slots, caches, _batch(length, len(groups))


def _names(slots: list[WeightSlot], checkpoint: Checkpoint, method: Int4) -> dict[int, list[str]]:
    """The tensors that can be calibrated, by the id of the module that multiplies them."""
    return {
        id(slot.module): [
            name for name in sorted(quantizable_names(slot.spec, checkpoint.tensors)) if method.accepts(checkpoint.tensors[name].shape, 1)
        ]
        for slot in slots
        if isinstance(slot.module, ColumnLinear | RowLinear) and slot.spec.is_quantizable
    }


def _slots_in(modules: Iterable[nnx.Module], slots: list[WeightSlot]) -> list[WeightSlot]:
    inside = {id(part) for module in modules for _, part in nnx.iter_modules(module)}
    return [slot for slot in slots if id(slot.module) in inside]


def _with(checkpoint: Checkpoint, found: Mapping[str, PackedWeight]) -> Checkpoint:
    """The checkpoint with the values that the quantized matrices have."""
    values = {name: LazyTensor(checkpoint.tensors[name].shape, "float32", weight.dequantize) for name, weight in found.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **values})


def _drop(slots: list[WeightSlot], mesh: Mesh) -> None:
    """Free the memory of parameters."""
    for slot in slots:
        setattr(slot.module, slot.name, nnx.Param(sharding.struct(mesh, getattr(slot.module, slot.name).get_value(), slot.partition)))


# ---- running -------------------------------------------------------------------------------------------------------------


def _embed(
    model: Any, slots: list[WeightSlot], checkpoint: Checkpoint, mesh: Mesh, windows: Windows, batch: ForwardBatch
) -> tuple[list[Float[Array, "T E"]], Any]:
    """What enters the first layer, window by window, and the rotations, which all windows share."""
    in_layers = {id(slot) for slot in _slots_in(model.layers, slots)}
    outside = [slot for slot in slots if id(slot) not in in_layers]
    load_parameters(outside, checkpoint, mesh)
    embedded = [model.embed(jnp.asarray(window, jnp.int32), batch) for window in windows]
    _drop(outside, mesh)
    return [x for x, _ in embedded], embedded[0][1]


def _batch(length: int, num_groups: int) -> ForwardBatch:
    """One whole sequence in the blocks from 1 on, without padding."""
    positions = np.arange(length, dtype=np.int32)
    blocks = np.arange(1, ceil_div(length, BLOCK_SIZE) + 1, dtype=np.int32)
    fields = {
        "token_ids": np.zeros_like(positions),  # each window's go to `embed`
        "positions": positions,
        "token_slots": np.zeros_like(positions),
        "is_fed_back": np.zeros_like(positions),
        "slot_mapping": np.tile(BLOCK_SIZE + positions, (num_groups, 1)),
        "block_tables": np.tile(blocks, (num_groups, 1, 1)),
        "query_start_loc": np.array([0, length], np.int32),
        "context_lens": np.array([length], np.int32),
        "logits_indices": np.zeros(1, np.int32),
    }
    arrays = {name: jnp.asarray(values) for name, values in fields.items()}
    return ForwardBatch(**arrays, attention_implementation=None)


@partial(jax.jit, static_argnums=0)
def _run_layer(graph: Any, state: Any, x: Array, rotation: Any, kv: LayerKV, batch: ForwardBatch) -> Float[Array, "T E"]:
    return nnx.merge(graph, state)(x, rotation, kv, batch)[0]


class Moments(nnx.Variable[Any]):
    """The sum of x x^T over a matrix's inputs x, float32 [K K]."""


class Recorder(nnx.Module):
    """A product that adds its inputs' second moments to `moments`."""

    def __init__(self, linear: Any):
        self.linear = linear
        self.moments = Moments(jnp.zeros((linear.weight.get_value().shape[1],) * 2, jnp.float32))

    def __call__(self, x: Float[Array, "T K"]) -> Float[Array, "T N"]:
        """The product."""
        self.moments.set_value(self.moments.get_value() + jnp.matmul(x.T, x, preferred_element_type=jnp.float32))
        return self.linear(x)

    def split(self, fused: Float[Array, "T N"]) -> list[Float[Array, "T n"]]:
        """As `ColumnLinear.split`."""
        return self.linear.split(fused)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add_moments(graph: Any, moments: Any, state: Any, x: Array, rotation: Any, kv: LayerKV, batch: ForwardBatch) -> Any:
    layer = nnx.merge(graph, moments, state)
    layer(x, rotation, kv, batch)
    return nnx.state(layer, Moments)


def _record(layer: nnx.Module, inputs: Sequence[tuple[Any, ...]]) -> dict[int, np.ndarray]:
    """The second moments of what enters each of a layer's products, by the id of its module."""
    places = [
        (parent, name, child)
        for _, parent in list(nnx.iter_modules(layer))
        for name, child in vars(parent).items()
        if isinstance(child, ColumnLinear | RowLinear)
    ]
    for parent, name, child in places:
        setattr(parent, name, Recorder(child))
    graph, moments, state = nnx.split(layer, Moments, ...)
    for of_window in inputs:
        moments = _add_moments(graph, moments, state, *of_window)
    nnx.update(layer, moments)
    found = {}
    for parent, name, child in places:
        found[id(child)] = np.asarray(getattr(parent, name).moments.get_value())
        setattr(parent, name, child)
    return found
