"""What a kernel may compile to: each operation's `budgets.py` lists its kernels with these, `make check-gpu` holds them to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

MAX_SHARED_BYTES = 232_448
"""Shared memory that one thread block may ask for on Hopper (227 KiB)."""

MAX_REGISTERS = 255
"""Registers that one thread can have."""

type Peak = Literal["bfloat16", "int8"]
type Compiler = Literal["mosaic", "xla"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedBytes:
    """A small case of a kernel whose copies are counted while the interpreter executes it.

    `count` runs it and gives the bytes copied between GPU memory and shared memory or registers; `floor_bytes` is what any kernel has to move
    for that case: every input that it needs read once, every output written once.
    """

    count: Callable[[], int]
    floor_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCheck:
    """One kernel at one size, and what it may compile to. Beyond what is listed, no kernel may spill or have its wgmma serialized.

    Attributes:
        name: told apart from the operation's others by it, e.g. "decode_bfloat16_128".
        run: the function to compile; it is called with `arguments`, traced for the device (`common.mosaic.device()`).
        arguments: pytrees of `jax.ShapeDtypeStruct`, at a size that is served, not a toy: nothing is allocated.
        devices: names from `deviceless.devices.DEVICES`.
        max_registers: per thread, of each kernel.
        max_shared_bytes: static and dynamic together, per thread block, of each kernel.
        required: instructions that must be there, as regular expressions that match the beginning of a name as `deviceless.ptx` writes it:
            `wgmma.m64n128k16.f32.bf16.bf16`, `mma.m16n8k32.s32.s8.s8.s32`, `cp.async.bulk.tensor.2d.load`, `cp.async.cg`, ...
            E.g. `(r"wgmma.*bf16", r"cp\\.async\\.bulk\\.tensor")`. At least one kernel of the check must have each.
        forbidden: instructions that no kernel of the check may have, likewise.
        floor_bytes: what has to be read and written once each in GPU memory at this size.
        floor_flops: multiplications and additions of the matrix products at this size.
        peak: the rate that `floor_flops` is set against.
        donate_argnums: arguments whose memory the results take over; if given, all of it has to be aliased.
        compiler: whose kernels are held to the budget: "mosaic", or "xla" for what XLA fuses by itself. Spills are looked for in both.
        copied: a case for the interpreter, whose copies are counted.
    """

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    max_registers: int
    max_shared_bytes: int
    required: tuple[str, ...]
    floor_bytes: int
    floor_flops: int = 0
    peak: Peak = "bfloat16"
    devices: tuple[str, ...] = ("h100", "h200")
    forbidden: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    compiler: Compiler = "mosaic"
    copied: CopiedBytes | None = None

    def __post_init__(self) -> None:
        """Refuse limits beyond what the hardware has.

        Raises:
            ValueError: a limit or a floor is out of range.
        """
        if not 0 < self.max_registers <= MAX_REGISTERS:
            raise ValueError(f"{self.name}: max_registers must be between 1 and {MAX_REGISTERS}, got {self.max_registers}")
        if not 0 <= self.max_shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(f"{self.name}: max_shared_bytes must be between 0 and {MAX_SHARED_BYTES}, got {self.max_shared_bytes}")
        if self.floor_bytes <= 0 or self.floor_flops < 0:
            raise ValueError(f"{self.name}: floors must be positive, got {self.floor_bytes} bytes and {self.floor_flops} flops")
