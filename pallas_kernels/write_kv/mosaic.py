"""write_kv as one Mosaic GPU kernel, which writes keys and values into their pools where they lie.

A thread block takes a few tokens, one warpgroup their keys and another their values: one copy brings the vectors of all heads to
shared memory, another for each token takes them to its slot. In between, what goes into a pool of one byte a number is rounded
in registers.
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

from pallas_kernels.common import mosaic, tuned
from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.one_byte import LARGEST, SMALLEST, inverse

ROWS = 64
"""Vectors in shared memory, one for each token and head of a thread block: what a warpgroup's registers are laid out for."""
MAX_COLUMNS = 128
"""Numbers of a vector in registers at once."""
COPY_BYTES = 16
"""What the rows of an array that is copied by TMA are a multiple of."""


MAX_TOKENS = 8
"""Of a thread block; the code for each stands there by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sizes.

    Attributes:
        tile_tokens: tokens of a thread block.
    """

    tile_tokens: int


CANDIDATES = tuple(Config(tile_tokens=tokens) for tokens in (1, 2, 4, 8))
"""What the tuner tries."""


def pick_config(num_tokens: int, num_heads: int, device: mosaic.Device) -> Config:
    """As many thread blocks as there are multiprocessors, if the tokens suffice; then as many tokens each as there is room for.

    Raises:
        UnsupportedByKernel: more heads than rows.
    """
    if num_heads > ROWS:
        raise UnsupportedByKernel(f"takes at most {ROWS} KV heads on a device, got {num_heads}")
    key = tuned.key("write_kv", tokens=tuned.bucket(num_tokens), heads=num_heads)
    if (found := tuned.lookup("write_kv", device.kind, key)) is not None:
        return Config(**found)
    return Config(tile_tokens=max(1, min(MAX_TOKENS, ROWS // num_heads, num_tokens // device.num_cores)))


def columns(head_dim: int, dtype: Any) -> int:
    """How many numbers of a vector are copied, and in registers, at once: a divisor of its length.

    Raises:
        UnsupportedByKernel: vectors that no copy can take.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if head_dim * itemsize % COPY_BYTES:
        raise UnsupportedByKernel(f"vectors must be a multiple of {COPY_BYTES} bytes, got {head_dim} of {dtype}")
    step = max(8, COPY_BYTES // itemsize)
    sizes = [size for size in range(step, MAX_COLUMNS + 1, step) if head_dim % size == 0]
    if not sizes:
        raise UnsupportedByKernel(f"a vector's length must be a multiple of {step}, got {head_dim}")
    return sizes[-1]


def write_kv(
    k_blocks: Num[Array, "K N S D"],
    v_blocks: Num[Array, "K N S Dv"] | None,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"] | None,
    slot_mapping: Int32[Array, "T"],
    k_scales: Float32[Array, "K N S"] | None = None,
    v_scales: Float32[Array, "K N S"] | None = None,
    *,
    interpret: bool = False,
    config: Config | None = None,
) -> tuple[Any, Any, Any, Any]:
    """See `api.write_kv`. Pools that come in donated are written where they lie; others are copied first.

    Args:
        interpret: asked for by name: where there is no Hopper GPU, run in Pallas' GPU interpreter instead of refusing.
        config: instead of the one that is picked.

    Raises:
        UnsupportedByKernel: no Hopper GPU, sizes that it does not take; not asked for by name and XLA has fewer launches.
    """
    if not interpret and k_scales is None and k.shape[0] > 1:
        # One kernel for each pool, and what a custom call reads has to be written first.
        raise UnsupportedByKernel("XLA's scatters into pools of floats compute the vectors as well, one launch less")
    config = config or pick_config(k.shape[0], k.shape[1], mosaic.device())
    num_rows = config.tile_tokens * k.shape[1]
    if num_rows > ROWS:
        raise UnsupportedByKernel(f"{config} of {k.shape[1]} heads are more than {ROWS} rows")
    if k_scales is not None and num_rows % 8 == 0 and k.shape[0] * k.shape[1] % 8:
        # What registers read and copies fill is laid out in tiles of 8 rows where it can be, and then copies take whole ones.
        raise UnsupportedByKernel(f"all tokens' heads must be a multiple of 8 as those of {config} are, got {k.shape[:2]}")
    writes = [_Write.of(k_blocks, k, k_scales)]
    if v_blocks is not None and v is not None:
        writes.append(_Write.of(v_blocks, v, v_scales))
    run = mosaic.kernel(
        functools.partial(_kernel, writes=writes, config=config),
        interpret=interpret,
        out_type=(),
        scratch_types=[write.memory() for write in writes],
        grid=(pl.cdiv(k.shape[0], config.tile_tokens),),
        grid_names=("tile",),
        num_threads=len(writes),
        thread_name="pool",
        kernel_name="write_kv",
    )
    pools = [[jax.new_ref(pool) for pool in (write.blocks, write.scales) if pool is not None] for write in writes]
    run([write.rows for write in writes], pools, slot_mapping.astype(jnp.int32))
    keys, values = [_values(refs) for refs in pools] + [(None, None)] * (2 - len(pools))
    return keys[0], values[0], keys[1], values[1]


def _values(refs: list[Any]) -> tuple[Any, Array | None]:
    blocks, scales = (*refs, None)[:2]
    return jax.freeze(blocks), None if scales is None else jax.freeze(scales)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Write:
    """One pool and what goes into it."""

    blocks: Array
    scales: Array | None
    rows: Array
    """[T * K, D]: the new vectors, of the pool's dtype where it is a float's."""
    num_heads: int
    columns: int

    @classmethod
    def of(cls, blocks: Array, new: Array, scales: Array | None) -> _Write:
        rows = new.reshape(-1, new.shape[2]).astype(blocks.dtype if scales is None else new.dtype)
        size = min(columns(new.shape[2], blocks.dtype), columns(new.shape[2], rows.dtype))
        return cls(blocks=blocks, scales=scales, rows=rows, num_heads=new.shape[1], columns=size)

    @property
    def num_parts(self) -> int:
        """How many runs of columns a vector is cut into."""
        return self.rows.shape[1] // self.columns

    def memory(self) -> dict[str, Any]:
        """In shared memory."""
        shape = (self.num_parts, ROWS, self.columns)
        parts: dict[str, Any] = {"new": plgpu.SMEM(shape, self.rows.dtype), "arrived": plgpu.Barrier(num_arrivals=self.num_parts)}
        if self.scales is not None:
            parts |= {"rounded": plgpu.SMEM(shape, self.blocks.dtype), "scales": plgpu.SMEM((ROWS,), jnp.float32)}
        return parts


def _kernel(rows: Any, pools: Any, slots: Any, *memory: Any, writes: list[_Write], config: Config) -> None:
    for index, write in enumerate(writes):

        @pl.when(lax.axis_index("pool") == index)
        def _(index: int = index, write: _Write = write) -> None:
            _write_tile(write, config, rows[index], pools[index], slots, memory[index])


def _write_tile(write: _Write, config: Config, rows: Any, pools: list[Any], slots: Any, memory: Any) -> None:
    """The new vectors of one thread block's tokens into one pool."""
    num_rows = config.tile_tokens * write.num_heads
    first = lax.axis_index("tile") * config.tile_tokens
    for part in range(write.num_parts):
        # Past the last token come zeros, which nobody stores.
        source = rows.at[pl.ds(first * write.num_heads, num_rows), pl.ds(part * write.columns, write.columns)]
        plgpu.copy_gmem_to_smem(source, memory["new"].at[part, pl.ds(0, num_rows)], memory["arrived"])
    num_tokens = slots.shape[0]
    # All of them before the first is needed: one after another, each would take as long as the copy.
    places = [slots[jnp.minimum(first + token, num_tokens - 1)] for token in range(config.tile_tokens)]
    wait_for(memory["arrived"])
    ready = memory["new"]
    if write.scales is not None:
        _round(write, memory)
        ready = memory["rounded"]
    _, num_blocks, block_size, _ = write.blocks.shape
    for token, slot in enumerate(places):

        @pl.when((first + token < num_tokens) & (slot < num_blocks * block_size))
        def _(token: int = token, slot: Any = slot) -> None:
            block, offset = place_of(slot, block_size)
            heads = pl.ds(token * write.num_heads, write.num_heads)
            for part in range(write.num_parts):
                target = pools[0].at[:, block, offset, pl.ds(part * write.columns, write.columns)]
                plgpu.copy_smem_to_gmem(ready.at[part, heads], target)
            if write.scales is not None:
                for head in range(write.num_heads):
                    pools[1][head, block, offset] = memory["scales"][token * write.num_heads + head]

    plgpu.wait_smem_to_gmem(0)


def _round(write: _Write, memory: Any) -> None:
    """The vectors in steps of their scales, rounded, and the scales, to shared memory."""

    def in_registers(part: Any) -> Array:
        return plgpu.layout_cast(memory["new"][part].astype(jnp.float32), plgpu.Layout.WGMMA)

    dtype = write.blocks.dtype
    limit = LARGEST[dtype.name]
    largest = lax.fori_loop(
        0,
        write.num_parts,
        lambda part, largest: jnp.maximum(largest, jnp.max(jnp.abs(in_registers(part)), axis=1)),
        plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
    )
    scale = jnp.where(largest > SMALLEST, largest * inverse(limit), 1.0)
    memory["scales"][...] = scale
    factor = lax.broadcast_in_dim(1.0 / scale, (ROWS, write.columns), (0,))

    @pl.loop(0, write.num_parts)
    def _(part: Any) -> None:
        numbers = in_registers(part) * factor
        if jnp.issubdtype(dtype, jnp.integer):
            numbers = lax.round(numbers, lax.RoundingMethod.TO_NEAREST_EVEN)
        memory["rounded"][part] = jnp.clip(numbers, -limit, limit).astype(dtype)

    publish()


def place_of(slot: Any, block_size: int) -> tuple[Any, Any]:
    """The block of a slot, and the offset in it."""
    return lax.div(slot, block_size), lax.rem(slot, block_size)


def wait_for(arrived: Any) -> None:
    """Until the vectors are in shared memory."""
    plgpu.barrier_wait(arrived)


def publish() -> None:
    """Let the copies that follow see what registers have written to shared memory."""
    plgpu.commit_smem()
