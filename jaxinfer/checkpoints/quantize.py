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
from jaxinfer.quant.weight import Method


def stored_tensors(checkpoint: Checkpoint, storage: Storage) -> dict[str, LazyTensor]:
    """Every tensor, with `packed` set where it is to be written in quantized form.

    Raises:
        CheckpointError, UnsupportedModelError: the model has to be known to say which matrices can be quantized, and is not.
    """
    if storage.method is None and not storage.keeps_packed:
        return {name: replace(tensor, packed=None) for name, tensor in checkpoint.tensors.items()}
    wanted = quantizable_tensors(checkpoint, storage.has_embeddings)
    return {
        name: _stored(tensor, storage.method) if name in wanted else replace(tensor, packed=None)
        for name, tensor in checkpoint.tensors.items()
    }


def _stored(tensor: LazyTensor, method: Method | None) -> LazyTensor:
    if method is None or not method.accepts(tensor.shape, 1):
        return tensor if method is None else replace(tensor, packed=None)
    packed = PackedTensor(method.abstract(tensor.shape), lambda: method.from_float(np.asarray(tensor.read(), np.float32)))
    return replace(tensor, packed=packed)


def quantizable_tensors(checkpoint: Checkpoint, has_embeddings: bool) -> set[str]:
    """The names of matrices that the model multiplies as they lie in the checkpoint, [out, in].

    A tensor that is transposed, or that stacks experts, is none of them.
    """
    file = str(checkpoint.path)
    architecture = find(checkpoint.config, file)
    config = architecture.Config.from_hf(checkpoint.config, file)
    model = architecture.Model(config, sharding.make_mesh(1), jnp.dtype(jnp.float32), min(config.max_positions, 8))
    names: set[str] = set()
    for _, module in nnx.iter_modules(model):
        for value in vars(module).values():
            if isinstance(value, nnx.Param):
                names |= _quantizable(value.get_metadata()["spec"], checkpoint.tensors, has_embeddings)
    return names


def _quantizable(spec: WeightSpec, tensors: Mapping[str, LazyTensor], has_embeddings: bool) -> set[str]:
    if not spec.is_quantizable or ("vocab" in spec.axes and not has_embeddings):
        return set()
    sources = [Source(source) if isinstance(source, str) else source for source in spec.sources]
    return {
        source.name for source in sources if not source.is_transposed and source.expert is None and len(tensors[source.name].shape) == 2
    }
