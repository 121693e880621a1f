"""Sizes in config.json against the tensors: a model is built before shapes are compared, so no size may be beyond them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.errors import CheckpointError

SIZES = ("head_dim", "hidden_size", "n_embd", "qk_rope_head_dim", "vocab_size")
"""Each is at most the largest dimension of any tensor. Rope tables are made of them."""
COUNTS = (
    "n_group",
    "n_layer",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_hidden_layers",
    "num_local_experts",
    "num_nextn_predict_layers",
)
"""Each has tensors of its own, or is a dimension of one. Modules are made for each."""


def check_sizes(config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], file: str) -> None:
    """Refuse a configuration whose sizes no file of these tensors can have.

    Raises:
        CheckpointError: naming `file` and the attribute.
    """
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    for name in (*SIZES, *COUNTS):
        value = config.get(name)
        bound = max(largest, len(tensors)) if name in COUNTS else largest
        if isinstance(value, int) and value > bound:
            raise CheckpointError(
                f"{str(value)[:60]} is beyond the tensors: there are {len(tensors)}, their largest dimension is {largest}",
                file=file,
                field=name,
            )
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if isinstance(layers, int) and layers > len(tensors):
        raise CheckpointError(f"{layers} layers, but there are {len(tensors)} tensors in all", file=file, field="num_hidden_layers")
