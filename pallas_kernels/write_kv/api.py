"""The public signature of write_kv and its implementations."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common.dispatch import Operation
from pallas_kernels.common.mosaic import late
from pallas_kernels.common.one_byte import LARGEST, has_scales
from pallas_kernels.write_kv import reference

OPERATION = Operation(
    name="write_kv",
    implementations={"mosaic": late("pallas_kernels.write_kv.mosaic", "write_kv"), "xla": reference.write_kv},
    if_named={"mosaic": {"interpret": True}},
)

Pools = tuple[
    Num[Array, "K N S D"],
    Num[Array, "K N S Dv"] | None,
    Float32[Array, "K N S"] | None,
    Float32[Array, "K N S"] | None,
]
"""Keys, values, scales of the keys, scales of the values."""


def write_kv(
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S Dv"] | None,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"] | None,
    slot_mapping: Int32[Array, "T"],
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    *,
    implementation: str | None = None,
) -> Pools:
    """Put token t's vectors into slot `slot_mapping[t]` (block * S + offset) of every head; the pools are meant to be donated.

    Slots at or past N * S are dropped. Padding tokens write to the trash block, whose content nobody reads; of several tokens in
    one slot any may stay, also one in parts.

    Args:
        k_blocks: the pool of keys; float, or of one byte a number: int8, float8_e4m3fn.
        v_blocks: the pool of values; None for a latent cache, whose values are columns of the keys.
        k, v: one vector per token and head, cast to the dtype of a float pool; v is None where v_blocks is.
        slot_mapping: where each token goes.
        k_scales, v_scales: of a pool of one byte a number, else None. The vector of each token and head is multiplied by 1 / scale
            and rounded half to even; see `common.one_byte.scales_of`.

    Returns:
        Keys, values, scales of the keys and of the values (None where None came in).

    Raises:
        ValueError: arguments that do not fit each other, scales without a pool of one byte a number or the reverse.
    """
    if (v_blocks is None) != (v is None):
        raise ValueError(f"v and v_blocks come together, got {'no ' if v is None else ''}v and {'no ' if v_blocks is None else ''}v_blocks")
    _check(k_blocks, k, slot_mapping, k_scales, "k")
    if v_blocks is not None and v is not None:
        _check(v_blocks, v, slot_mapping, v_scales, "v")
        if v_blocks.shape[:3] != k_blocks.shape[:3]:
            raise ValueError(f"k_blocks {k_blocks.shape} and v_blocks {v_blocks.shape} must agree but in the last axis")
    elif v_scales is not None:
        raise ValueError("v_scales must be None without v_blocks")
    return OPERATION(k_blocks, v_blocks, k, v, slot_mapping, k_scales, v_scales, implementation=implementation)


def _check(blocks: Array, new: Array, slot_mapping: Array, scales: Array | None, name: str) -> None:
    if new.shape != (slot_mapping.shape[0], blocks.shape[0], blocks.shape[3]):
        raise ValueError(f"{name} {new.shape} must be [T K D] for {name}_blocks {blocks.shape} and slot_mapping {slot_mapping.shape}")
    if has_scales(blocks.dtype) != (scales is not None):
        raise ValueError(
            f"{name}_scales go with a pool of {' or '.join(LARGEST)} and no other, got {blocks.dtype} "
            f"{'without' if scales is None else 'with'} scales"
        )
    if scales is not None and scales.shape != blocks.shape[:3]:
        raise ValueError(f"{name}_scales {scales.shape} must be [K N S] for {name}_blocks {blocks.shape}")
