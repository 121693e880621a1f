"""KV blocks out of the pool and into it: the engine's own programs, alone and with the copy to and from pinned host memory in them.

Between steps the copies to and from the host are calls of their own (`jax.device_put`). Here they are compiled together with the gather
before or the scatter after them: there a compiler could lose the memory kind, compute in host memory, or copy the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.check_gpu.steps import BLOCK_SIZE, MIB, NUM_BLOCKS, Program, bytes_per_device, elements_per_device, refused, results_of_size

if TYPE_CHECKING:
    from jaxinfer.kv.block_programs import BlockPrograms
    from pallas_kernels.deviceless.compiler import Memory

NUM_LAYERS = 4
NUM_MOVED = 16
"""Blocks of one call: the largest of `block_programs.BUCKETS`."""
SLACK_BYTES = MIB // 8
"""Temporaries beside one copy of the blocks that are moved."""


def pool_over(mesh: Any) -> tuple[list[Any], BlockPrograms]:
    """A pool of Llama-3-8B's shape, and its programs, over a Mesh or an AbstractMesh."""
    from jaxinfer.kv.block_programs import BlockPrograms
    from jaxinfer.kv.cache import layer_shapes
    from jaxinfer.kv.groups import KVGroupSpec, KVTensorSpec

    tensors = tuple(KVTensorSpec(name=name, num_heads=8, head_dim=128, dtype="bfloat16") for name in ("keys", "values"))
    group = KVGroupSpec(kind="full", layers=tuple(range(NUM_LAYERS)), tensors=tensors)
    layers = layer_shapes([group], [NUM_BLOCKS], BLOCK_SIZE, mesh)
    return layers, BlockPrograms(layers, mesh, NUM_MOVED)


def check_memory(layers: list[Any], moved: int, memory: Memory, hlo: str, *, is_written: bool) -> dict[str, Any]:
    """Hold a program to its temporaries, and the pool to its place.

    Raises:
        AssertionError: what was claimed, and what came out.
    """
    pool = bytes_per_device(layers)
    expected = pool if is_written else 0
    assert memory.aliased >= expected, f"pool: {expected} bytes are to be written in place, {memory.aliased} are"
    copies = results_of_size(hlo, elements_per_device(layers[0].keys))
    assert not copies, f"pool: arrays of its size are made by {copies}"
    limit = moved + SLACK_BYTES
    temporaries = memory.temporaries
    assert temporaries <= limit, f"temporaries: at most {limit} bytes allowed, for {moved} that are moved, got {temporaries}"
    return {"moved_kib": moved >> 10, "temp_kib": temporaries >> 10, "pool_mib": pool // MIB}


def on_device(num_devices: int) -> dict[str, Any]:
    """The programs as the engine compiles them: none of them knows of the host."""
    from jaxinfer.kv import block_programs
    from jaxinfer.sharding import TENSOR
    from pallas_kernels.deviceless.compiler import topology_mesh

    layers, programs = pool_over(topology_mesh("h200", {TENSOR: num_devices}))
    moved = NUM_MOVED * bytes_per_device(programs.block_shape)
    figures = {}
    for program in (block_programs._gather, block_programs._scatter, block_programs._copy):
        compiled = Program.compile(programs.lower(program, NUM_MOVED))
        is_written = program is not block_programs._gather
        figures[program.__name__] = check_memory(layers, moved, compiled.memory, compiled.text, is_written=is_written)
    return figures


def with_host(num_devices: int, *, is_donated: bool = True, keeps_kinds: bool = True) -> dict[str, Any]:
    """Gather and copy out, copy in and scatter, over a mesh that keeps memory kinds.

    Raises:
        AssertionError: what was claimed, and what came out.
    """
    import jax
    import jax.numpy as jnp

    from jaxinfer.kv import block_programs
    from jaxinfer.sharding import TENSOR
    from pallas_kernels.deviceless.compiler import abstract_mesh, compile_on, topology_mesh

    def of_kind(tree: Any, kind: str) -> Any:
        return jax.tree.map(lambda sharding: sharding.with_memory_kind(kind), tree)

    axes = {TENSOR: num_devices}
    mesh = abstract_mesh("h200", axes) if keeps_kinds else topology_mesh("h200", axes)
    layers, programs = pool_over(mesh)
    ids = jax.ShapeDtypeStruct((NUM_MOVED,), jnp.int32)
    host, device = (of_kind(programs._on_device, kind) for kind in ("pinned_host", "device"))
    on_host = jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), programs.block_shape, host)

    def into_pool(layers: Any, ids: Any, blocks: Any) -> Any:
        return block_programs._scatter(layers, ids, jax.device_put(blocks, (device,) * NUM_MOVED))

    out = compile_on(mesh, block_programs._gather, [layers, ids], out_shardings=(host,) * NUM_MOVED)
    back = compile_on(
        mesh,
        into_pool,
        [layers, ids, (on_host,) * NUM_MOVED],
        donate_argnums=(0,) if is_donated else (),
        out_shardings=of_kind(programs._in_pool, "device"),
    )
    moved = NUM_MOVED * bytes_per_device(programs.block_shape)
    figures = {}
    for name, compiled, host_bytes in (("out", out, out.memory.host_outputs), ("in", back, back.memory.host_arguments)):
        assert host_bytes == moved, f"{name}, host memory: {moved} bytes expected, got {host_bytes}"
        assert compiled.memory.host_temporaries == 0, f"{name}, host memory: {compiled.memory.host_temporaries} bytes of temporaries"
        figures[name] = check_memory(layers, moved, compiled.memory, compiled.hlo, is_written=name == "in")
    return figures


CHECKS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    **{f"on_device_{num_devices}xh200": partial(on_device, num_devices) for num_devices in (1, 8)},
    **{f"with_host_{num_devices}xh200": partial(with_host, num_devices) for num_devices in (1, 8)},
    "control_without_donation": partial(refused, "written in place", partial(with_host, 1, is_donated=False)),
    # JAX drops memory kinds over the devices of a topology: what is compiled then never leaves the device.
    "control_kinds_dropped": partial(refused, "host memory", partial(with_host, 1, keeps_kinds=False)),
}
