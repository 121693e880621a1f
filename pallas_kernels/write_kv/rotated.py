"""Rotary position embedding of queries and keys, and the write of keys and values, from the fused projection in one go."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.common.mosaic import late
from pallas_kernels.write_kv import reference


def in_xla(
    qkv: Float[Array, "T HKK D"],
    rotation: Float32[Array, "T D"],
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S D"],
    slot_mapping: Int32[Array, "T"],
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
) -> tuple[Any, ...]:
    """See `rotate_and_write_kv`."""
    num_kv_heads = k_blocks.shape[0]
    turned, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    cos, sin = jnp.split(rotation[:, None, :], 2, axis=-1)
    first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(qkv.dtype)
    q, k = turned[:, :-num_kv_heads], turned[:, -num_kv_heads:]
    return q, *reference.write_kv(k_blocks, v_blocks, k, v, slot_mapping, k_scales, v_scales)


OPERATION = Operation(
    name="rotate_and_write_kv",
    implementations={"mosaic": late("pallas_kernels.write_kv.mosaic_rotated", "rotate_and_write_kv"), "xla": in_xla},
    if_named={"mosaic": {"interpret": True}},
)


def rotate_and_write_kv(
    qkv: Float[Array, "T HKK D"],
    rotation: Float32[Array, "T D"],
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S D"],
    slot_mapping: Int32[Array, "T"],
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Any, ...]:
    """Rotate the heads of queries and keys, entry i with entry i + D / 2 (arXiv:2104.09864), and do what `write_kv` does.

    Args:
        qkv: of each token H heads of queries, K of keys, K of values.
        rotation: cosines in the first half of the last axis, sines in the second; applied in float32, the result has qkv's dtype.
        k_blocks, v_blocks, slot_mapping, k_scales, v_scales: see `write_kv`.

    Returns:
        The rotated queries [T H D], keys, values, scales of the keys, scales of the values.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    if rotation.shape != (num_tokens, head_dim) or slot_mapping.shape != (num_tokens,):
        raise ValueError(f"rotation {rotation.shape} and slot_mapping {slot_mapping.shape} must be [T D] and [T] for qkv {qkv.shape}")
    if num_heads <= 2 * k_blocks.shape[0] or k_blocks.shape != v_blocks.shape or k_blocks.shape[3] != head_dim or head_dim % 2:
        raise ValueError(f"qkv {qkv.shape} must have heads of queries, keys and values for pools {k_blocks.shape} and {v_blocks.shape}")
    return OPERATION(qkv, rotation, k_blocks, v_blocks, slot_mapping, k_scales, v_scales, implementation=implementation)
