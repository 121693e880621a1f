"""What decode and prefill share: tiles of keys and values, fetched block by block into stages of shared memory; scores and their mask.

A tile is `tile_keys` consecutive keys of one row and one KV head. Blocks of a tile that none of its queries sees are not read:
what lies in their place is left over or uninitialized, may be NaN, and is masked as the unused slots of a block are.
Logits are in base 2: softmax(x) = 2 ** (x * LOG2E - highest) / sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.one_byte import has_scales

LOG2E = math.log2(math.e)
MASKED = -1e30
"""The logit of a key that is not seen; finite, so that differences of two of them are no NaN."""
WGMMA_ROWS = 64
"""Rows of the left operand of a matrix instruction."""
COLUMNS_AT_ONCE = 64
"""Of 64 rows, how many columns are in registers together."""
MAX_DIM = 256
MAX_LATENT_DIM = 576
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
PRODUCT_DTYPE = jnp.dtype(jnp.bfloat16)
"""Of the operands of matrix products; it holds every number of a cache exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """What is known of the pools when a kernel is traced; of a latent cache values are the first `value_dim` columns of the keys."""

    num_kv_heads: int
    block_size: int
    key_dim: int
    value_dim: int
    dtype: str
    is_latent: bool

    @classmethod
    def of(cls, k_blocks: Any, v_blocks: Any | None, value_dim: int | None) -> Cache:
        """The cache in these pools.

        Raises:
            UnsupportedByKernel: a dtype, block size or dim that the kernels do not have.
        """
        num_kv_heads, _, block_size, key_dim = k_blocks.shape
        values = value_dim if v_blocks is None else v_blocks.shape[3]
        assert values is not None, "api.paged_attention checks that a latent cache has a value_dim"
        if str(k_blocks.dtype) not in DTYPES:
            raise UnsupportedByKernel(f"the cache must be {' or '.join(DTYPES)}, got {k_blocks.dtype}")
        if block_size not in BLOCK_SIZES:
            raise UnsupportedByKernel(f"the block size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}")
        largest = MAX_LATENT_DIM if v_blocks is None else MAX_DIM
        if not all(0 < dim <= largest and dim % 16 == 0 for dim in (key_dim, values)):
            raise UnsupportedByKernel(f"key and value dim must be multiples of 16 up to {largest}, got {key_dim} and {values}")
        return cls(
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            key_dim=key_dim,
            value_dim=values,
            dtype=str(k_blocks.dtype),
            is_latent=v_blocks is None,
        )

    @property
    def has_scales(self) -> bool:
        """Whether vectors are of one byte a number, with a scale each."""
        return has_scales(self.dtype)

    @property
    def value_columns(self) -> int:
        """Columns of values as left operands of products: `value_dim` rounded up to whole ones."""
        return -(-self.value_dim // WGMMA_ROWS) * WGMMA_ROWS

    @property
    def copies_values(self) -> bool:
        """Whether values go through registers to become left operands: they are of one byte, or a row is no whole operand."""
        return self.has_scales or self.value_columns != self.value_dim

    @property
    def keys_in_row(self) -> int:
        """What `operand_transforms` is to divide for keys: of a latent cache the keys alone and the values alone are operands."""
        return math.gcd(self.key_dim, self.value_dim) if self.is_latent else self.key_dim

    @property
    def bytes_per_key(self) -> int:
        """Of one token and KV head in the pools."""
        numbers = self.key_dim + (0 if self.is_latent else self.value_dim)
        scales = (1 if self.is_latent else 2) if self.has_scales else 0
        return numbers * jnp.dtype(self.dtype).itemsize + 4 * scales


class Pools(NamedTuple):
    """The pools as arrays or as references in a kernel; what a cache does not have is None."""

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any

    def present(self) -> list[Any]:
        """Those that are there, in order: a kernel's arguments."""
        return [array for array in self if array is not None]

    def rebuilt(self, refs: Any) -> Pools:
        """References to those that are there, at their places."""
        refs = iter(refs)
        return Pools(*(None if array is None else next(refs) for array in self))


class Stages(NamedTuple):
    """Shared memory that tiles are fetched into: [stages, tile_keys, columns], scales [stages, tile_keys]; None as in `Pools`.

    `full[s]` completes when all copies of stage s have landed, `free[s]` when each reader has arrived.
    """

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any
    full: Any
    free: Any


def operand_transforms(num_columns: int, dtype: Any) -> tuple[Any, ...]:
    """How the matrix instructions want a row-major operand to lie: rows of 8, swizzled over the widest span that divides a row.

    Raises:
        UnsupportedByKernel: a row is no multiple of 32 bytes.
    """
    itemsize = jnp.dtype(dtype).itemsize
    for swizzle in (128, 64, 32):
        if num_columns * itemsize % swizzle == 0:
            return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
    raise UnsupportedByKernel(f"rows of {num_columns} numbers of {dtype} are no multiple of 32 bytes")


def stage_types(cache: Cache, tile_keys: int, num_stages: int, num_readers: int = 1) -> Stages:
    """Scratch of a kernel whose `num_readers` warpgroups read each tile."""

    def vectors(dim: int, columns: int) -> Any:
        return plgpu.SMEM((num_stages, tile_keys, columns), jnp.dtype(cache.dtype), transforms=operand_transforms(dim, cache.dtype))

    keys = vectors(cache.keys_in_row, cache.key_dim)
    values = None if cache.is_latent else vectors(cache.value_dim, cache.value_dim)
    scales = plgpu.SMEM((num_stages, tile_keys), jnp.float32) if cache.has_scales else None
    num_pools = (1 if values is None else 2) * (2 if cache.has_scales else 1)
    num_copies = tile_keys // min(tile_keys, cache.block_size) * num_pools
    full = plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages)
    free = plgpu.Barrier(num_arrivals=num_readers, num_barriers=num_stages)
    return Stages(keys, values, scales, None if values is None else scales, full, free)


class Place(NamedTuple):
    """Whose keys a thread block reads: those of KV head `head`; its queries see `first` to `end` - 1 at most."""

    head: Any
    first: Any
    end: Any


def tile_blocks(cache: Cache, tables: Any, row: Any, tile: Any, tile_keys: int) -> list[Any]:
    """The ids of a tile's blocks; any ids past the table. To be loaded well before `fetch_tile`: each is a round trip to memory."""
    starts = (tile * tile_keys + offset for offset in range(0, tile_keys, min(tile_keys, cache.block_size)))
    return [tables[row, jnp.minimum(lax.div(start, jnp.int32(cache.block_size)), tables.shape[1] - 1)] for start in starts]


def fetch_tile(cache: Cache, pools: Pools, blocks: list[Any], place: Place, tile: Any, stages: Stages, slot: Any) -> None:
    """Start the copies of a tile's keys and values into a stage that nobody reads any more."""
    tile_keys = stages.keys.shape[1]
    run = min(tile_keys, cache.block_size)
    dims = (cache.key_dim, cache.value_dim, None, None)
    present = [(pool, stage, dim) for pool, stage, dim in zip(pools, stages[:4], dims, strict=True) if pool is not None]
    for index, block in enumerate(blocks):
        start = tile * tile_keys + index * run
        source = (place.head, block, pl.ds(lax.rem(start, jnp.int32(cache.block_size)) if run < cache.block_size else 0, run))
        target = (slot, pl.ds(index * run, run))

        def copy(source: Any = source, target: Any = target) -> None:
            for pool, stage, dim in present:
                if dim is None:
                    copy_contiguous(pool.at[source], stage.at[target], stages.full.at[slot])
                else:
                    plgpu.copy_gmem_to_smem(pool.at[source], stage.at[(*target, pl.ds(0, dim))], stages.full.at[slot])

        def skip() -> None:
            for _ in present:
                plgpu.barrier_arrive(stages.full.at[slot])

        lax.cond((start < place.end) & (start + run > place.first), copy, skip)


def copy_contiguous(source: Any, target: Any, barrier: Any) -> None:
    """Start a copy of a few numbers side by side to a multiple of 16 bytes.

    A promise to stay within the array makes it a plain bulk copy; a tensor copy faults where shared memory is no multiple of 128 bytes.
    """
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def key_positions(shape: tuple[int, int], keys_axis: int, tile: Any, tile_keys: int) -> jax.Array:
    """The position of each score's key in its row, int32, for scores of `shape` as a matrix product leaves them."""
    return plgpu.broadcasted_iota(jnp.int32, shape, keys_axis, layout=plgpu.Layout.WGMMA) + tile * tile_keys


def logits(products: jax.Array, key_scales: jax.Array | None, keys_axis: int, scale: float, soft_cap: float | None) -> jax.Array:
    """Base-2 logits of q k^T; `key_scales` [tile_keys] of one-byte keys."""
    if key_scales is not None:
        products = products * along(key_scales, products.shape, keys_axis)
    if soft_cap is None:
        return products * (scale * LOG2E)
    return capped(products, scale / soft_cap) * (soft_cap * LOG2E)


def capped(x: jax.Array, factor: float) -> jax.Array:
    """tanh(x * factor) to float32's absolute accuracy; the hardware's own tanh has 11 bits, too few times a cap of 50."""
    return 1.0 - 2.0 * (1.0 / (1.0 + jnp.exp2(x * (2 * factor * LOG2E))))  # a reciprocal is one instruction, a quotient several


def along(vector: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """The vector laid along an axis of a matrix."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def softmax_tile(scores: jax.Array, is_seen: jax.Array, highest: jax.Array, keys_axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One tile of an online softmax (arXiv:1805.02867).

    Args:
        scores: base-2 logits; NaN allowed where not `is_seen`.
        highest: of each query so far.

    Returns:
        The new highest, each key's weight relative to it, and what earlier sums are to be multiplied by.
    """
    scores = jnp.where(is_seen, scores, MASKED)
    new_highest = jnp.maximum(highest, scores.max(axis=keys_axis))
    weights = jnp.exp2(scores - along(new_highest, scores.shape, 1 - keys_axis))
    return new_highest, jnp.where(is_seen, weights, 0.0), jnp.exp2(highest - new_highest)


def pieces(num_rows: int, num_columns: int, tile_columns: int) -> list[tuple[Any, Any]]:
    """Parts of a tile, of 64 rows, few enough to be held in registers."""
    rows = [pl.ds(start, WGMMA_ROWS) for start in range(0, num_rows, WGMMA_ROWS)]
    columns = [pl.ds(start, min(tile_columns, num_columns - start)) for start in range(0, num_columns, tile_columns)]
    return [(row, column) for row in rows for column in columns]


def clear_unseen(tile_ref: Any, tile: Any, tile_keys: int, first: Any, end: Any) -> None:
    """Zero the rows of a tile of values that no query sees, if there are any: their weight is zero, but zero times NaN is NaN."""

    @pl.when((tile * tile_keys < first) | ((tile + 1) * tile_keys > end))
    def _() -> None:
        num_rows, num_columns = tile_ref.shape
        for rows, columns in pieces(num_rows, num_columns, COLUMNS_AT_ONCE):
            piece = tile_ref.at[rows, columns]
            piece[...] = only_seen(plgpu.load(piece, layout=plgpu.Layout.WGMMA), tile * tile_keys + rows.start, first, end)
        plgpu.commit_smem()


def only_seen(vectors: jax.Array, first_key: Any, first: Any, end: Any) -> jax.Array:
    """Vectors of consecutive keys, zero but for keys `first` to `end` - 1."""
    position = plgpu.broadcasted_iota(jnp.int32, vectors.shape, 0, layout=plgpu.Layout.WGMMA) + first_key
    return jnp.where((position >= first) & (position < end), vectors, jnp.zeros((), vectors.dtype))


def widened(tile_ref: Any) -> jax.Array:
    """Vectors in registers as numbers of `PRODUCT_DTYPE`, ready to be the left operand of a product or to be stored as an operand."""
    if tile_ref.dtype == PRODUCT_DTYPE:
        return plgpu.load(tile_ref, layout=plgpu.Layout.WGMMA)
    tile = plgpu.load(tile_ref, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if tile.dtype != jnp.int8:  # no instruction makes bfloat16 of float8
        tile = tile.astype(jnp.float16).astype(jnp.float32)
    return plgpu.layout_cast(tile.astype(PRODUCT_DTYPE), plgpu.Layout.WGMMA)
