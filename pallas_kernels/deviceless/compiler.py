"""Compile jitted functions for GPUs that are not there: memory, final HLO, and the PTX of every kernel.

`topology_mesh` stands for the devices; `compile_on` compiles under it. What it cannot show: run time, the tuned choice of library GEMMs (there
is nothing to tune on, so temporaries may differ by their workspaces), and that the code loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.deviceless.devices import DeviceFacts, facts, target_config
from pallas_kernels.deviceless.dumped import DumpedKernel, Dumps
from pallas_kernels.deviceless.toolchain import assembler_first, find_toolchain


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one device that a program needs.

    Attributes:
        arguments, outputs, temporaries: on the device; outputs hold those that are aliased.
        aliased: of the outputs, what takes over the memory of donated arguments.
        peak: the most that lives at once, arguments among it.
        host_arguments, host_outputs, host_temporaries: in host memory.
        code: of the compiled kernels.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    peak: int
    host_arguments: int
    host_outputs: int
    host_temporaries: int
    code: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A program for devices that are not there.

    Attributes:
        memory: what it needs of each device.
        hlo: after all of XLA's passes, scheduled; collectives and copies stand in it as they run.
        kernels: in the order they were compiled, empty without `with_kernels`.
    """

    memory: Memory
    hlo: str
    kernels: tuple[DumpedKernel, ...]


def topology_mesh(device: str, axes: Mapping[str, int]) -> Mesh:
    """A mesh of GPUs that need not exist, in one host; its axes are `AxisType.Auto`, their product is the number of devices.

    Raises:
        ToolchainMissing: no CUDA plugin on Python's path.
        ValueError: unknown device.
    """
    toolchain = find_toolchain()
    config = target_config(facts(device), toolkit=toolchain.cuda_version)
    shape = tuple(axes.values())
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{math.prod(shape)}")
    return Mesh(np.array(topology.devices).reshape(shape), tuple(axes), axis_types=(AxisType.Auto,) * len(shape))


def abstract_mesh(device: str, axes: Mapping[str, int]) -> AbstractMesh:
    """A mesh without devices, for shardings whose memory kinds must stay in the program ("pinned_host").

    Those of `topology_mesh` lose them without a word: JAX asks the topology's devices, and they know of no memories.

    Raises:
        ValueError: unknown device.
    """
    found = facts(device)
    stand_in = AbstractDevice(device_kind=found.kind, num_cores=found.num_cores, platform="gpu")
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), abstract_device=stand_in)


def compile_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    device: str = "h200",
    num_devices: int = 1,
    donate_argnums: Sequence[int] = (),
    with_kernels: bool = False,
) -> Compiled:
    """`compile_on` for so many devices on one mesh axis, "tensor"."""
    mesh = topology_mesh(device, {"tensor": num_devices})
    return compile_on(mesh, fn, args, donate_argnums=donate_argnums, with_kernels=with_kernels)


def compile_on(
    mesh: Mesh | AbstractMesh,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    donate_argnums: Sequence[int] = (),
    out_shardings: Any = None,
    with_kernels: bool = False,
) -> Compiled:
    """Compile `fn(*args)` for the mesh's devices.

    Args:
        mesh: from `topology_mesh`; or from `abstract_mesh`, which keeps memory kinds, at the price of an interface private to JAX.
        fn: to be jitted here, or jitted already: then it says itself what it donates and how its results are sharded.
        args: pytrees of `jax.ShapeDtypeStruct`; one without a sharding is whole on every device.
        out_shardings: as `jax.jit` takes them.
        with_kernels: read the PTX of every kernel as well. What the compiler prints meanwhile is read and not shown, so one thread at a time.

    Raises:
        ToolchainMissing: no CUDA plugin or no ptxas on Python's path.
        ValueError: donations or shardings for a function that is jitted already.
    """
    options: dict[str, Any] = {"donate_argnums": tuple(donate_argnums)} if donate_argnums else {}
    options |= {} if out_shardings is None else {"out_shardings": out_shardings}
    is_jitted = hasattr(fn, "trace")
    if is_jitted and options:
        raise ValueError(f"{getattr(fn, '__name__', fn)} is jitted already: give {', '.join(options)} to jax.jit")
    jitted: Any = fn if is_jitted else jax.jit(fn, **options)
    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda leaf: leaf if leaf.sharding is not None else leaf.update(sharding=whole), tuple(args))
    with ExitStack() as stack:
        stack.enter_context(assembler_first(find_toolchain()))
        dumps = stack.enter_context(Dumps()) if with_kernels else None
        compiler_options = dumps.compiler_options if dumps else {}
        if isinstance(mesh, Mesh):
            stack.enter_context(jax.set_mesh(mesh))
            compiled = jitted.trace(*placed).lower(lowering_platforms=("cuda",)).compile(compiler_options=compiler_options)
            stats, hlo = compiled.memory_analysis(), compiled.as_text()
        else:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            lowered = jitted.trace(*placed).lower(lowering_platforms=("cuda",))
            stats, hlo = _compile_lowered(lowered, mesh, compiler_options)
    return Compiled(memory=memory_of(stats), hlo=hlo, kernels=dumps.kernels() if dumps else ())


def _compile_lowered(lowered: jax.stages.Lowered, mesh: AbstractMesh, compiler_options: Mapping[str, str]) -> tuple[Any, str]:
    """Memory statistics and HLO of a program that was lowered without devices, compiled for those of a topology."""
    from jax._src import compiler
    from jax._src.lib import _jax

    assert mesh.abstract_device is not None
    found: DeviceFacts = facts(mesh.abstract_device.device_kind)
    devices = tuple(topology_mesh(found.kind, dict(mesh.shape)).devices.flat)
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.arange(len(devices)).reshape(1, -1),
        env_options_overrides=dict(compiler_options),
        backend=devices[0].client,
    )
    module = lowered.compiler_ir("stablehlo")
    executable = compiler.backend_compile_and_load(devices[0].client, module, _jax.DeviceList(devices), options, [])
    (optimized,) = executable.hlo_modules()
    return executable.get_compiled_memory_stats(), optimized.to_string()


def memory_of(stats: Any) -> Memory:
    """What XLA says of a compiled program's memory (`jax.stages.Compiled.memory_analysis()`)."""
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        host_arguments=stats.host_argument_size_in_bytes,
        host_outputs=stats.host_output_size_in_bytes,
        host_temporaries=stats.host_temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
