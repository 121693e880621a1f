"""The public signature of write_kv and its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.write_kv import reference

OPERATION = Operation(name="write_kv", implementations={"xla": reference.write_kv})


def write_kv(
    blocks: Float[Array, "K N S D"], new: Float[Array, "T K D"], slot_mapping: Int32[Array, "T"], *, implementation: str | None = None
) -> Float[Array, "K N S D"]:
    """Put token t's vectors into slot `slot_mapping[t]` (block * S + offset) of every head; the pool is meant to be donated.

    Slots at or past N * S are dropped. Padding tokens write to the trash block, whose content nobody reads.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if new.shape != (slot_mapping.shape[0], blocks.shape[0], blocks.shape[3]):
        raise ValueError(f"new {new.shape} must be [T K D] for blocks {blocks.shape} and slot_mapping {slot_mapping.shape}")
    return OPERATION(blocks, new, slot_mapping, implementation=implementation)
