"""Rotation and write in one Mosaic GPU kernel: a thread block brings a token's heads in, turns them, and takes each to its place.

XLA makes three to five kernels of it, each of which reads the projection again, and beside a custom call one more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.common import mosaic
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.one_byte import LARGEST, SMALLEST, has_scales, inverse, rounded
from pallas_kernels.write_kv.mosaic import COPY_BYTES, ROWS, place_of, publish, wait_for

LAYOUT = plgpu.Layout.WGMMA
MAX_HEAD_DIM = 256
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Which rows of a token are queries, keys and values."""

    num_q: int
    num_kv: int
    half: int
    """Half of a head's entries: those that turn with the other half."""

    @property
    def total(self) -> int:
        """Rows of a token."""
        return self.num_q + 2 * self.num_kv

    def parts(self, group: int) -> dict[str, tuple[int, int, int]]:
        """Of the rows of a thread block, by whose they are: first row in the block, first head, how many."""
        first, found = group * ROWS, {}
        for name, start, count in (("q", 0, self.num_q), ("k", self.num_q, self.num_kv), ("v", self.num_q + self.num_kv, self.num_kv)):
            low, high = max(first, start), min(first + ROWS, start + count)
            if low < high:
                found[name] = low - first, low - start, high - low
        return found


def rotate_and_write_kv(
    qkv: Float[Array, "T HKK D"],
    rotation: Float32[Array, "T D"],
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S D"],
    slot_mapping: Int32[Array, "T"],
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """See `rotated.rotate_and_write_kv`. Pools that come in donated are written where they lie; others are copied first.

    Raises:
        UnsupportedByKernel: no Hopper GPU, sizes and dtypes that it does not take.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv = k_blocks.shape[0]
    heads = Heads(num_q=num_heads - 2 * num_kv, num_kv=num_kv, half=head_dim // 2)
    refuse(qkv, k_blocks)
    pools = {"k": [k_blocks, k_scales], "v": [v_blocks, v_scales]}
    refs = {name: [jax.new_ref(array) for array in arrays if array is not None] for name, arrays in pools.items()}
    run = mosaic.kernel(
        functools.partial(_kernel, heads=heads),
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((num_tokens, heads.num_q, head_dim), qkv.dtype),
        scratch_types=[memory(heads, qkv.dtype, k_blocks.dtype)],
        grid=(num_tokens, pl.cdiv(heads.total, ROWS)),
        grid_names=("token", "group"),
        kernel_name="rotate_and_write_kv",
    )
    q = run(qkv, rotation, slot_mapping.astype(jnp.int32), refs)
    (k_blocks, k_scales), (v_blocks, v_scales) = [(*map(jax.freeze, refs[name]), None)[:2] for name in "kv"]
    return q, k_blocks, v_blocks, k_scales, v_scales


def refuse(qkv: Array, blocks: Array) -> None:
    """Raise UnsupportedByKernel for what the kernel does not take."""
    half, itemsize = qkv.shape[2] // 2, min(blocks.dtype.itemsize, qkv.dtype.itemsize)
    if half % 8 or half * itemsize % COPY_BYTES or qkv.shape[2] > MAX_HEAD_DIM:
        raise UnsupportedByKernel(
            f"half a head must be a multiple of 8 numbers and {COPY_BYTES} bytes, {MAX_HEAD_DIM // 2} at most, got {half} of {blocks.dtype}"
        )
    if qkv.shape[1] > ROWS and qkv.shape[1] % 8:
        raise UnsupportedByKernel(f"more than {ROWS} heads must be a multiple of 8, got {qkv.shape[1]}")
    if str(qkv.dtype) not in DTYPES or not (blocks.dtype == qkv.dtype or has_scales(blocks.dtype)):
        raise UnsupportedByKernel(f"pools must be of the projection's dtype or of one byte a number, got {blocks.dtype} for {qkv.dtype}")


def memory(heads: Heads, dtype: Any, cache_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a thread block."""
    shape = (2, ROWS, heads.half)
    held: dict[str, Any] = {
        "rows": plgpu.SMEM(shape, dtype),
        "turned": plgpu.SMEM(shape, dtype),
        "rotation": plgpu.SMEM((2, heads.half), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=4),
    }
    if has_scales(cache_dtype):
        held |= {"rounded": plgpu.SMEM(shape, cache_dtype), "scales": plgpu.SMEM((ROWS,), jnp.float32)}
    return held


def _kernel(qkv: Any, rotation: Any, slots: Any, pools: Any, q: Any, held: Any, *, heads: Heads) -> None:
    token, group = lax.axis_index("token"), lax.axis_index("group")
    num_rows = min(ROWS, heads.total)
    for part in range(2):
        columns = pl.ds(part * heads.half, heads.half)
        source = qkv.at[token, pl.ds(group * ROWS, num_rows), columns]
        plgpu.copy_gmem_to_smem(source, held["rows"].at[part, pl.ds(0, num_rows)], held["arrived"])
        plgpu.copy_gmem_to_smem(rotation.at[token, columns], held["rotation"].at[part], held["arrived"])
    slot = slots[token]
    wait_for(held["arrived"])
    turn(held, group, heads)
    publish()
    for index in range(pl.cdiv(heads.total, ROWS)):

        @pl.when(group == index)
        def _(index: int = index) -> None:
            _store(heads.parts(index), token, slot, pools, q, held, heads)

    plgpu.wait_smem_to_gmem(0)


def turn(held: Any, group: Any, heads: Heads) -> None:
    """The rows rotated, those of values as they are; where the pool is of one byte a number, also rounded, with their scales."""
    first, second = (plgpu.layout_cast(held["rows"][part].astype(jnp.float32), LAYOUT) for part in range(2))
    cos, sin = (_for_each_row(plgpu.load(held["rotation"].at[part], layout=LAYOUT.reduce(0))) for part in range(2))
    row = plgpu.broadcasted_iota(jnp.int32, first.shape, 0, layout=LAYOUT)
    is_turned = row + group * ROWS < heads.num_q + heads.num_kv
    halves = [jnp.where(is_turned, new, old) for new, old in zip(rotate(first, second, cos, sin), (first, second), strict=True)]
    dtype = held["turned"].dtype
    for part, half in enumerate(halves):
        held["turned"][part] = half.astype(dtype)
    if "rounded" not in held:
        return
    cache_dtype = held["rounded"].dtype
    halves = [half.astype(dtype).astype(jnp.float32) for half in halves]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(half), axis=1) for half in halves])
    scale = jnp.where(largest > SMALLEST, largest * inverse(LARGEST[jnp.dtype(cache_dtype).name]), 1.0)
    held["scales"][...] = scale
    factor = lax.broadcast_in_dim(1.0 / scale, halves[0].shape, (0,))
    for part, half in enumerate(halves):
        held["rounded"][part] = rounded(half * factor, cache_dtype)


def rotate(first: Array, second: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Both halves of some heads turned by their angles."""
    return first * cos - second * sin, second * cos + first * sin


def _for_each_row(columns: Array) -> Array:
    return lax.broadcast_in_dim(columns, (ROWS, columns.shape[0]), (1,))


def _store(parts: Any, token: Any, slot: Any, pools: Any, q: Any, held: Any, heads: Heads) -> None:
    """Each row of a thread block to its place; those of keys and values whose slot is past the end to none."""
    if "q" in parts:
        row, head, count = parts["q"]
        for part in range(2):
            target = q.at[token, pl.ds(head, count), pl.ds(part * heads.half, heads.half)]
            plgpu.copy_smem_to_gmem(held["turned"].at[part, pl.ds(row, count)], target)
    for name in ("k", "v"):
        if name not in parts:
            continue
        blocks = pools[name][0]

        @pl.when(slot < blocks.shape[1] * blocks.shape[2])
        def _(name: str = name, blocks: Any = blocks) -> None:
            row, head, count = parts[name]
            block, offset = place_of(slot, blocks.shape[2])
            ready = held.get("rounded", held["turned"])
            for part in range(2):
                target = blocks.at[pl.ds(head, count), block, offset, pl.ds(part * heads.half, heads.half)]
                plgpu.copy_smem_to_gmem(ready.at[part, pl.ds(row, count)], target)
            if "rounded" in held:
                for index in range(count):
                    pools[name][1][head + index, block, offset] = held["scales"][row + index]
