"""KV blocks as numpy arrays that are moved one by one, what BlockMover is held against; and movers, compiled once."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np

from jaxinfer import sharding
from jaxinfer.kv.cache import LayerKV, layer_shapes
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec
from jaxinfer.kv.offload import BlockMover
from jaxinfer.messages import (
    BlockMove,
    CopyBlock,
    DiskEntry,
    Fetch,
    FetchResult,
    LoadBlock,
    StoreBlock,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 44
"""Usable ones, enough for every size of program."""


def pair(dtype: str) -> tuple[KVTensorSpec, ...]:
    return tuple(KVTensorSpec(name=name, num_heads=2, head_dim=8, dtype=dtype) for name in ("keys", "values"))


GROUPS: dict[str, tuple[KVGroupSpec, ...]] = {
    "float32": (
        KVGroupSpec(kind="full", layers=(0, 2), tensors=pair("float32")),
        KVGroupSpec(kind="window", window=8, layers=(1,), tensors=pair("float32")),
    ),
    "bfloat16": (KVGroupSpec(kind="full", layers=(0, 1), tensors=pair("bfloat16")),),
    "int8": (KVGroupSpec(kind="full", layers=(0, 1), tensors=pair("int8")),),
    "float8": (KVGroupSpec(kind="full", layers=(0, 1), tensors=pair("float8_e4m3fn")),),
    "latent": (
        KVGroupSpec(kind="latent", layers=(0, 1), tensors=(KVTensorSpec(name="keys", num_heads=1, head_dim=12, dtype="bfloat16"),)),
    ),
}
TICKETS = itertools.count(1)


@functools.cache
def shapes_of(name: str, num_devices: int) -> list[LayerKV]:
    groups = GROUPS[name]
    return layer_shapes(groups, [NUM_BLOCKS] * len(groups), BLOCK_SIZE, sharding.make_mesh(num_devices))


@functools.cache
def make_mover(name: str = "float32", num_devices: int = 1, checks_crc: bool = False, max_staged_blocks: int = 64) -> BlockMover:
    """Compiled once; tests leave nothing outstanding in it and read no slot that they did not store."""
    options = {"checks_crc": checks_crc, "max_staged_blocks": max_staged_blocks}
    mover = BlockMover(shapes_of(name, num_devices), GROUPS[name], sharding.make_mesh(num_devices), **options)
    for job in mover.compile_jobs():
        job()
    return mover


def mover_with(disk: DiskBlocks, name: str = "float32", num_devices: int = 1) -> BlockMover:
    mover = BlockMover(shapes_of(name, num_devices), GROUPS[name], sharding.make_mesh(num_devices), disk=disk)
    for job in mover.compile_jobs():
        job()
    return mover


def random_kv(name: str, num_devices: int = 1, seed: int = 0) -> tuple[list[LayerKV], list[dict[str, np.ndarray]]]:
    """The pool on the device, and as numpy arrays: any bits at all, NaN among them."""
    rng = np.random.default_rng(seed)

    def fill(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.frombuffer(rng.bytes(shape.size * shape.dtype.itemsize), shape.dtype).reshape(shape.shape)

    host = [jax.tree.map(fill, layer) for layer in shapes_of(name, num_devices)]
    device = jax.tree.map(lambda array, shape: jax.device_put(array, shape.sharding), host, shapes_of(name, num_devices))
    return device, [arrays_of(layer) for layer in host]


def arrays_of(layer: LayerKV) -> dict[str, np.ndarray]:
    # Copies: what is donated later would change under a view.
    return {
        field: np.array(getattr(layer, field))
        for field in ("keys", "values", "key_scales", "value_scales")
        if getattr(layer, field) is not None
    }


class Oracle:
    """What moves mean, one at a time, on numpy arrays."""

    def __init__(self, groups: tuple[KVGroupSpec, ...], pool: list[dict[str, np.ndarray]]):
        self.groups = groups
        self.pool = [{field: array.copy() for field, array in layer.items()} for layer in pool]
        self.host: dict[tuple[int, int], list[dict[str, np.ndarray]]] = {}
        self.fetched: dict[int, list[list[dict[str, np.ndarray]]]] = {}

    def block(self, group: int, block_id: int) -> list[dict[str, np.ndarray]]:
        layers = [self.pool[layer] for layer in self.groups[group].layers]
        return [{field: array[:, block_id].copy() for field, array in layer.items()} for layer in layers]

    def put(self, group: int, block_id: int, block: list[dict[str, np.ndarray]]) -> None:
        for layer, contents in zip(self.groups[group].layers, block, strict=True):
            for field, content in contents.items():
                self.pool[layer][field][:, block_id] = content

    def move(self, move: BlockMove) -> None:
        match move:
            case CopyBlock(group, source, target):
                self.put(group, target, self.block(group, source))
            case StoreBlock(group, block_id, slot):
                self.host[group, slot] = self.block(group, block_id)
            case LoadBlock(ticket, index, group, block_id):
                self.put(group, block_id, self.fetched[ticket][index])

    def fetch(self, fetch: Fetch) -> None:
        self.fetched[fetch.ticket] = [self.host[source.group, source.host_slot] for source in fetch.sources]


def assert_same(kv: list[LayerKV], pool: list[dict[str, np.ndarray]], but_for_trash: bool = False) -> None:
    first = 1 if but_for_trash else 0
    for layer, expected in zip(kv, pool, strict=True):
        for field, array in arrays_of(layer).items():
            assert array.dtype == expected[field].dtype
            assert array[:, first:].tobytes() == expected[field][:, first:].tobytes()


def fetch_all(mover: BlockMover, sources: list[Any]) -> int:
    ticket = next(TICKETS)
    mover.fetch([Fetch(ticket, tuple(sources))])
    mover.wait()
    assert mover.finished() == [FetchResult(ticket)]
    return ticket


def entry(number: int, group: int = 0) -> DiskEntry:
    return DiskEntry(bytes([number] * 32), group, tuple(range(number, number + 8)), b"namespace")
