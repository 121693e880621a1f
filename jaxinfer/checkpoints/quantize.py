"""The tensors of a checkpoint as they are to be stored: in floats, as they are packed already, or quantized now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer import sharding
from jaxinfer.checkpoints.load import Storage
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor, PackedTensor
from jaxinfer.layers.weights import Source, WeightSpec
from jaxinfer.models.config import find


def stored_tensors(checkpoint: Checkpoint, storage: Storage) -> dict[str, LazyTensor]:
    """Every tensor, with `packed` set where it is to be written in quantized form.

    Raises:
        CheckpointError, UnsupportedModelError: the model has to be known to say which matrices can be quantized, and is not.
    """
    wanted = quantizable_tensors(checkpoint)
    return {
        name: _stored(tensor, storage.of(wanted[name])) if name in wanted else replace(tensor, packed=None)
        for name, tensor in checkpoint.tensors.items()
    }


def _stored(tensor: LazyTensor, storage: Storage) -> LazyTensor:
    method = storage.method
    if method is None:
        return tensor if storage.keeps_packed else replace(tensor, packed=None)
    if not method.accepts(tensor.shape, 1):
        return replace(tensor, packed=None)
    packed = PackedTensor(method.abstract(tensor.shape), lambda: method.from_float(np.asarray(tensor.read(), np.float32)))
    return replace(tensor, packed=packed)


def quantizable_tensors(checkpoint: Checkpoint) -> dict[str, WeightSpec]:
    """The matrices that the model multiplies as they lie in the checkpoint, [out, in], with the parameter that each is of.

    A tensor that is transposed, or that stacks experts, is none of them.
    """
    file = str(checkpoint.path)
    architecture = find(checkpoint.config, file)
    config = architecture.Config.from_hf(checkpoint.config, file)
    model = architecture.Model(config, sharding.make_mesh(1), jnp.dtype(jnp.float32), min(config.max_positions, 8))
    found: dict[str, WeightSpec] = {}
    for _, module in nnx.iter_modules(model):
        for value in vars(module).values():
            if isinstance(value, nnx.Param):
                spec: WeightSpec = value.get_metadata()["spec"]
                found |= dict.fromkeys(_quantizable(spec, checkpoint.tensors), spec)
    return found


def _quantizable(spec: WeightSpec, tensors: Mapping[str, LazyTensor]) -> set[str]:
    if not spec.is_quantizable:
        return set()
    sources = [Source(source) if isinstance(source, str) else source for source in spec.sources]
    return {
        source.name for source in sources if not source.is_transposed and source.expert is None and len(tensors[source.name].shape) == 2
    }
