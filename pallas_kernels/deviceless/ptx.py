"""What a kernel's PTX assembles to: registers, spills, shared memory, instructions, and ptxas' complaints about wgmma."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PTXAS_SECONDS = 120

_ENTRY = re.compile(r"\.visible \.entry ([\w$]+)")
_LOSS = re.compile(r"\((C\d+)\) Potential Performance Loss: (.*)")
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"(?<![\w.%$])((?:wgmma\.mma_async|mma\.sync|mma\.sp|cp\.async|cp\.reduce\.async|ldmatrix|stmatrix|setmaxnreg|atom|red)\.[\w.:]+)"
)
# Words of an instruction that say nothing about what work it does.
_NOISE = frozenset(("sync", "aligned", "row", "col", "mma_async"))


class AssemblerError(Exception):
    """ptxas refused the PTX; the text is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """One function as ptxas sees it.

    Attributes:
        registers: per thread.
        spill_bytes: stored to local memory and loaded from it, in bytes per thread.
        static_shared_bytes: shared memory that the function declares itself; what the launch adds is not in it.
        instructions: how often each instruction stands in the PTX, by the names that `instruction_name` makes.
        losses: what ptxas says of lost performance, e.g. that it put a wait after every wgmma (C7510 and the codes after it), or that it
            ignored setmaxnreg.
    """

    registers: int
    spill_bytes: int
    static_shared_bytes: int
    instructions: Mapping[str, int]
    losses: tuple[str, ...]


def entry_name(ptx: str) -> str | None:
    """The name of the kernel in a PTX module; None if it has none."""
    found = _ENTRY.search(ptx)
    return found[1] if found else None


def instruction_name(instruction: str) -> str:
    """A PTX instruction without the words that all of its kind have.

    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 is wgmma.m64n128k16.f32.bf16.bf16; bulk copies say their dimensions and which way
    they go, as in cp.async.bulk.tensor.2d.load (to shared memory) and cp.async.bulk.tensor.2d.store.
    """
    words = instruction.split(".")
    if words[:3] in (["cp", "async", "bulk"], ["cp", "reduce", "async"]):
        if words[3] in ("commit_group", "wait_group", "prefetch"):
            return ".".join(words[:4])
        kept = [word for word in words if word in ("cp", "async", "reduce", "bulk", "tensor") or re.fullmatch(r"\dd", word)]
        spaces = [word for word in words if word.startswith(("shared", "global"))]
        # The destination stands first.
        return ".".join([*kept, "load" if spaces and spaces[0].startswith("shared") else "store"])
    if words[:2] == ["cp", "async"]:
        return ".".join(words[:3])
    return ".".join(word for word in words if word not in _NOISE and "::" not in word)


def count_instructions(ptx: str) -> dict[str, int]:
    """How often each matrix, copy and atomic instruction stands in the PTX; those in inline assembly count too."""
    return dict(Counter(instruction_name(found) for found in _INSTRUCTION.findall(ptx)))


def parse_log(log: str) -> tuple[int, int, int, tuple[str, ...]]:
    """Registers, spilled bytes, static shared bytes and performance losses of `ptxas -v`'s report on one function.

    Raises:
        AssemblerError: the report names no registers.
    """
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise AssemblerError(f"ptxas -v named no registers: {log.strip()[:300]!r}")
    spills = [int(found) for found in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    shared = re.search(r"(\d+) bytes smem", log)
    losses = sorted({f"{code}: {text.strip()}" for code, text in _LOSS.findall(log)})
    return int(registers[1]), sum(spills), int(shared[1]) if shared else 0, tuple(losses)


def assemble(ptx: str, ptxas: Path) -> Assembled:
    """Run ptxas over a PTX module with one kernel in it.

    Raises:
        AssemblerError: it has no kernel, or ptxas fails.
    """
    target = _TARGET.search(ptx)
    if target is None or entry_name(ptx) is None:
        raise AssemblerError("the PTX names no target or has no kernel")
    command = [str(ptxas), "-v", f"-arch={target[1]}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, timeout=PTXAS_SECONDS, check=False)
    if done.returncode != 0:
        raise AssemblerError(f"ptxas failed with status {done.returncode}: {done.stderr.strip()[:500]}")
    registers, spill_bytes, shared_bytes, losses = parse_log(done.stdout + done.stderr)
    return Assembled(
        registers=registers,
        spill_bytes=spill_bytes,
        static_shared_bytes=shared_bytes,
        instructions=count_instructions(ptx),
        losses=losses,
    )
