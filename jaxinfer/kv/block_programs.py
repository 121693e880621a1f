"""Compiled copies of whole KV blocks: out of a group's arrays, into them, and within them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from jaxinfer.kv.block_pool import TRASH_BLOCK
from jaxinfer.kv.cache import LayerKV

BUCKETS = (1, 4, 16)
"""Blocks that one program moves."""


class BlockPrograms:
    """The programs of one KV group. Outside the pool, a block is a LayerKV whose leaves stack the group's layers.

    `keys` and `values` are then `[L K S D]`, the scales `[L K S]`, heads sharded as in the pool: few and contiguous arrays.

    Args:
        layers: shapes of the group's layers, which are all alike.
        max_blocks: no program moves more.
    """

    def __init__(self, layers: list[LayerKV], mesh: Mesh, max_blocks: int):
        self._layers = layers
        self._num_pool_blocks: int = layers[0].keys.shape[1]
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self.block_shape: LayerKV = jax.tree.map(partial(_block_shape, len(layers)), layers[0])
        """ShapeDtypeStructs of one block."""
        self._on_device = jax.tree.map(lambda shape: shape.sharding, self.block_shape)
        self._on_host = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), self._on_device)
        self._in_pool = jax.tree.map(lambda shape: shape.sharding, layers)
        self._buckets = [size for size in BUCKETS if size <= max_blocks]
        self._programs: dict[tuple[Callable[..., Any], int], Callable[..., Any]] = {}

    @property
    def num_pool_blocks(self) -> int:
        """Blocks of the group on the device, the trash block included."""
        return self._num_pool_blocks

    def compile_jobs(self) -> list[Callable[[], None]]:
        """What compiles the programs, one each; they may run in different threads."""
        return [partial(self._compile, program, size) for program in (_gather, _scatter, _copy) for size in self._buckets]

    def _compile(self, program: Callable[..., Any], size: int) -> None:
        self._programs[program, size] = self.lower(program, size).compile()

    def lower(self, program: Callable[..., Any], size: int) -> jax.stages.Lowered:
        """One of this module's programs for so many blocks, not compiled yet; the mesh's devices need not exist."""
        ids = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._everywhere)
        if program is _gather:
            jitted = jax.jit(_gather, out_shardings=(self._on_device,) * size)
            return jitted.lower(self._layers, ids)
        jitted = jax.jit(program, donate_argnums=0, out_shardings=self._in_pool)
        return jitted.lower(self._layers, ids, ids if program is _copy else (self.block_shape,) * size)

    def chunks(self, count: int) -> Iterator[slice]:
        """Cut `count` blocks into calls. A program less than half full gives way to smaller ones."""
        start = 0
        while start < count:
            size = self._bucket(count - start)
            yield slice(start, min(start + size, count))
            start += size

    def _bucket(self, count: int) -> int:
        smaller = [size for size in self._buckets if size <= count]
        return next((size for size in self._buckets if count <= size < 2 * count), smaller[-1])

    def gather(self, layers: list[LayerKV], block_ids: Sequence[int]) -> list[LayerKV]:
        """Copies of one chunk of blocks, on the device."""
        program = self._programs[_gather, self._bucket(len(block_ids))]
        return list(program(layers, self._ids(block_ids, [TRASH_BLOCK]))[: len(block_ids)])

    def scatter(self, layers: list[LayerKV], block_ids: Sequence[int], blocks: Sequence[LayerKV]) -> list[LayerKV]:
        """Write one chunk of blocks into different places of the pool; `layers` are donated."""
        assert len(set(block_ids)) == len(block_ids), f"a block is written twice at once: {block_ids}"
        size = self._bucket(len(block_ids))
        padded = (*blocks, *[blocks[0]] * (size - len(blocks)))
        return self._programs[_scatter, size](layers, self._ids(block_ids, self._nowhere), padded)

    def copy(self, layers: list[LayerKV], targets: Sequence[int], sources: Sequence[int]) -> list[LayerKV]:
        """Copy one chunk of blocks within the pool, where all are read before any is written; `layers` are donated."""
        assert len(set(targets)) == len(targets), f"a block is written twice at once: {targets}"
        program = self._programs[_copy, self._bucket(len(targets))]
        return program(layers, self._ids(targets, self._nowhere), self._ids(sources, [TRASH_BLOCK]))

    @property
    def _nowhere(self) -> range:
        """Indices behind the pool's end, where writes are dropped; all different, since the programs promise so to XLA."""
        return range(self._num_pool_blocks, self._num_pool_blocks + BUCKETS[-1])

    def _ids(self, block_ids: Sequence[int], padding: Sequence[int]) -> Int32[Array, "C"]:
        assert all(0 <= block_id < self._num_pool_blocks for block_id in block_ids), f"no such block: {block_ids}"
        ids = np.resize(np.array(padding, np.int32), self._bucket(len(block_ids)))
        ids[: len(block_ids)] = block_ids
        return jax.device_put(ids, self._everywhere)

    def to_host(self, blocks: list[LayerKV]) -> list[LayerKV]:
        """Begin to copy blocks from the device to pinned host memory, where each is an object of its own."""
        return jax.device_put(blocks, [self._on_host] * len(blocks))

    def to_device(self, blocks: list[LayerKV]) -> list[LayerKV]:
        """Begin to copy blocks from host memory, pinned or numpy, to the device, beside the pool."""
        return jax.device_put(blocks, [self._on_device] * len(blocks))


def _block_shape(num_layers: int, pool: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    num_heads, _, *rest = pool.shape
    sharding = pool.sharding
    assert isinstance(sharding, NamedSharding)
    stacked = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[:1]))
    return jax.ShapeDtypeStruct((num_layers, num_heads, *rest), pool.dtype, sharding=stacked)


def _gather(layers: list[LayerKV], ids: Int32[Array, "C"]) -> tuple[LayerKV, ...]:
    stacked = jax.tree.map(lambda *leaves: jnp.stack([leaf[:, ids] for leaf in leaves]), *layers)
    return tuple(jax.tree.map(lambda leaf, index=index: leaf[:, :, index], stacked) for index in range(ids.shape[0]))


def _scatter(layers: list[LayerKV], ids: Int32[Array, "C"], blocks: tuple[LayerKV, ...]) -> list[LayerKV]:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=2), *blocks)  # L K C ..
    return [
        jax.tree.map(lambda pool, new, layer=layer: _set(pool, ids, new[layer]), layer_kv, stacked) for layer, layer_kv in enumerate(layers)
    ]


def _copy(layers: list[LayerKV], targets: Int32[Array, "C"], sources: Int32[Array, "C"]) -> list[LayerKV]:
    return jax.tree.map(lambda pool: _set(pool, targets, pool[:, sources]), layers)


def _set(pool: Array, ids: Int32[Array, "C"], blocks: Array) -> Array:
    return pool.at[:, ids].set(blocks, mode="drop", unique_indices=True)
