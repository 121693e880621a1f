"""Numbers of `rotate_and_write_kv`, which has no specs of its own: those of write_kv that have values, and queries before them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.compare import row_error
from pallas_kernels.write_kv import rotate_and_write_kv, specs

NUM_QUERIES = 4
LIMITS = {"int8": 0.02, "float8_e4m3fn": 0.1}
"""Where a number may fall to its neighbour of one byte when what is rounded differs in the last bit."""
FLOAT_LIMITS = {"float32": 1e-5, "bfloat16": 2**-8}


def found() -> list[specs.Spec]:
    """Specs with values as wide as keys, whose halves can be rotated."""
    return [spec for spec in specs.SPECS if spec.value_dim == spec.head_dim and spec.head_dim % 16 == 0]


def arguments(spec: specs.Spec) -> dict[str, Any]:
    """As write_kv's, with the keys and values in one projection behind the queries, and angles of each token's own."""
    arrays, draws = specs.make_arguments(spec), np.random.default_rng(1)
    k, v = arrays.pop("k"), arrays.pop("v")
    q = draws.standard_normal((k.shape[0], NUM_QUERIES, k.shape[2])).astype(k.dtype)
    angles = draws.uniform(0, 7, (k.shape[0], k.shape[2] // 2))
    rotation = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    return arrays | {"qkv": np.concatenate([q, k, v], axis=1), "rotation": rotation}


def compare(implementation: str, spec: specs.Spec) -> tuple[float, float]:
    """The largest relative error of a row of queries or of what the written slots stand for, against XLA's form; and its limit."""
    arrays = jax.tree.map(jnp.asarray, arguments(spec))
    results = []
    for name in (implementation, "xla"):
        call = jax.jit(lambda kwargs, name=name: rotate_and_write_kv(**kwargs, implementation=name))
        results.append(meant(spec, np.asarray(arrays["slot_mapping"]), jax.device_get(call(arrays))))
    errors = [row_error(actual, expected) for actual, expected in zip(*results, strict=True)]
    return max(errors), LIMITS.get(spec.cache_dtype, max(FLOAT_LIMITS[spec.dtype], FLOAT_LIMITS[spec.cache_dtype]))


def meant(spec: specs.Spec, slots: np.ndarray, result: tuple[Any, ...]) -> list[np.ndarray]:
    """Queries, and the vectors in the slots that were written, multiplied by their scales."""
    q, *pools = result
    slots = slots[slots < spec.num_blocks * spec.block_size]
    vectors = []
    for blocks, scales in zip(pools[:2], pools[2:], strict=True):
        numbers = np.asarray(blocks, np.float32).reshape(blocks.shape[0], -1, blocks.shape[3])[:, slots]
        vectors.append(numbers if scales is None else numbers * np.asarray(scales).reshape(blocks.shape[0], -1)[:, slots, None])
    return [np.asarray(q, np.float32), *vectors]
