"""Holds one kernel to its budget on one device. Compiles, so it runs in a subprocess."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.common.budget import KernelCheck
from pallas_kernels.deviceless.compiler import Memory, compile_for
from pallas_kernels.deviceless.devices import DeviceFacts, facts
from pallas_kernels.deviceless.ptx import Assembled, assemble
from pallas_kernels.deviceless.toolchain import find_toolchain


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A kernel as it came out: what it assembles to, and the shared memory that its launch adds."""

    name: str
    compiler: str
    assembled: Assembled
    dynamic_shared_bytes: int

    @property
    def shared_bytes(self) -> int:
        return self.assembled.static_shared_bytes + self.dynamic_shared_bytes


def compile_and_hold(check: KernelCheck, device: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Figures of the compiled kernels, and what is wrong with them.

    Raises:
        ToolchainMissing, AssemblerError, and whatever tracing and compiling raise.
    """
    compiled = compile_for(check.run, check.arguments, device=device, donate_argnums=check.donate_argnums, with_kernels=True)
    ptxas = find_toolchain().ptxas
    # The layers of a program share their kernels: each text is assembled once.
    texts = {kernel.ptx: assemble(kernel.ptx, ptxas) for kernel in compiled.kernels}
    seen = [
        Seen(
            name=kernel.name,
            compiler=kernel.compiler,
            assembled=texts[kernel.ptx],
            dynamic_shared_bytes=kernel.dynamic_shared_bytes,
        )
        for kernel in compiled.kernels
    ]
    return figures(check, facts(device), seen, compiled.memory), problems(check, facts(device), seen, compiled.memory)


def problems(check: KernelCheck, device: DeviceFacts, seen: Sequence[Seen], memory: Memory) -> tuple[str, ...]:
    """In what the kernels break their budget."""
    found = []
    own = [kernel for kernel in seen if kernel.compiler == check.compiler]
    if not own:
        found.append(f"no kernel of {check.compiler} was compiled, only {', '.join(kernel.name for kernel in seen) or 'none at all'}")
    max_shared = min(check.max_shared_bytes, device.shared_bytes_per_block)
    for kernel in own:
        if kernel.assembled.registers > check.max_registers:
            found.append(f"{kernel.name}: {kernel.assembled.registers} registers, at most {check.max_registers} allowed")
        if kernel.shared_bytes > max_shared:
            found.append(f"{kernel.name}: {kernel.shared_bytes} bytes of shared memory, at most {max_shared} allowed")
    for kernel in seen:
        if kernel.assembled.spill_bytes:
            found.append(f"{kernel.name}: spills {kernel.assembled.spill_bytes} bytes, none allowed")
        found += [f"{kernel.name}: {loss}" for loss in kernel.assembled.losses]
    names = sorted({name for kernel in own for name in kernel.assembled.instructions})
    for pattern in check.required:
        if not any(re.match(pattern, name) for name in names):
            found.append(f"no instruction {pattern}, only {', '.join(names) or 'none of note'}")
    for pattern in check.forbidden:
        if unwanted := [name for name in names if re.match(pattern, name)]:
            found.append(f"has {', '.join(unwanted)}, which {pattern} forbids")
    donated = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for index in check.donate_argnums for leaf in jax.tree.leaves(check.arguments[index])
    )
    if memory.aliased < donated:
        found.append(f"only {memory.aliased} of {donated} donated bytes are aliased")
    return tuple(found)


def figures(check: KernelCheck, device: DeviceFacts, seen: Sequence[Seen], memory: Memory) -> dict[str, Any]:
    """What the table shows and what a budget is set by."""
    return {
        "kernels": [
            {
                "name": kernel.name,
                "compiler": kernel.compiler,
                "registers": kernel.assembled.registers,
                "spill_bytes": kernel.assembled.spill_bytes,
                "shared_bytes": kernel.shared_bytes,
                "instructions": dict(kernel.assembled.instructions),
            }
            for kernel in seen
        ],
        "subject": check.compiler,
        "temporary_bytes": memory.temporaries,
        "floor_bytes": check.floor_bytes,
        "floor_flops": check.floor_flops,
        "floor_seconds": device.floor_seconds(num_bytes=check.floor_bytes, flops=check.floor_flops, peak=check.peak),
    }
