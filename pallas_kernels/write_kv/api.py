"""The public signature of write_kv and its implementations."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.write_kv import reference

OPERATION = Operation(name="write_kv", implementations={"xla": reference.write_kv})


def write_kv(
    blocks: Num[Array, "K N S D"],
    new: Float[Array, "T K D"],
    slot_mapping: Int32[Array, "T"],
    scales: Float32[Array, "K N S"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Num[Array, "K N S D"], Float32[Array, "K N S"] | None]:
    """Put token t's vectors into slot `slot_mapping[t]` (block * S + offset) of every head; the pools are meant to be donated.

    Slots at or past N * S are dropped. Padding tokens write to the trash block, whose content nobody reads.

    Args:
        blocks: the pool of keys or of values; float, or int8.
        new: one vector per token and head, cast to the dtype of a float pool.
        slot_mapping: where each token goes.
        scales: of an int8 pool, else None. The vector of each token and head is rounded half to even to steps of its largest
            magnitude / 127, and that step is its scale; a vector of zeros has scale 1.

    Returns:
        The pool and its scales (None where None came in).

    Raises:
        ValueError: shapes that do not fit each other, scales without an int8 pool or the reverse.
    """
    if new.shape != (slot_mapping.shape[0], blocks.shape[0], blocks.shape[3]):
        raise ValueError(f"new {new.shape} must be [T K D] for blocks {blocks.shape} and slot_mapping {slot_mapping.shape}")
    if (blocks.dtype == jnp.int8) != (scales is not None):
        raise ValueError(
            f"an int8 pool comes with scales and no other does, got {blocks.dtype} {'without' if scales is None else 'with'} scales"
        )
    if scales is not None and scales.shape != blocks.shape[:3]:
        raise ValueError(f"scales {scales.shape} must be [K N S] for blocks {blocks.shape}")
    return OPERATION(blocks, new, slot_mapping, scales, implementation=implementation)
