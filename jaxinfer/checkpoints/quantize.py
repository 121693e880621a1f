"""The tensors of a checkpoint as they are to be stored: in floats, as they are packed already, or quantized now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxinfer import sharding
from jaxinfer.checkpoints.load import Storage, parameters
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor, PackedTensor
from jaxinfer.layers.weights import WeightSpec
from jaxinfer.models.config import find
from jaxinfer.quant.weight import QuantizedWeight


def stored_tensors(checkpoint: Checkpoint, storage: Storage, windows: Sequence[Sequence[int]] = ()) -> dict[str, LazyTensor]:
    """Every tensor, with `packed` set where it is to be written in quantized form.

    With `windows` of token ids matrices are calibrated on them, see `calibrate`.

    Raises:
        ConfigError: as `calibrate`.
        CheckpointError, UnsupportedModelError: the model has to be known to say which matrices can be quantized, and is not.
    """
    wanted = quantizable_tensors(checkpoint)
    tensors = {
        name: _stored(tensor, storage.of(wanted[name])) if name in wanted else replace(tensor, packed=None)
        for name, tensor in checkpoint.tensors.items()
    }
    if windows:
        from jaxinfer.checkpoints.calibrate import calibrate  # late: it sees this module

        for name, weight in calibrate(checkpoint, storage, windows).items():
            packed = tensors[name].packed
            assert packed is not None, f"{name} is calibrated but not to be quantized"
            tensors[name] = replace(tensors[name], packed=PackedTensor(packed.abstract, partial(_given, weight)))
    return tensors


def _given(weight: QuantizedWeight) -> QuantizedWeight:
    return weight


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
    for _, _, param in parameters(model):
        spec: WeightSpec = param.get_metadata()["spec"]
        found |= dict.fromkeys(quantizable_names(spec, checkpoint.tensors), spec)
    return found


def quantizable_names(spec: WeightSpec, tensors: Mapping[str, LazyTensor]) -> set[str]:
    """The matrices among a parameter's sources that are multiplied as they lie in the checkpoint."""
    if not spec.is_quantizable:
        return set()
    return {
        source.name for source in spec.parts if not source.is_transposed and source.expert is None and len(tensors[source.name].shape) == 2
    }
