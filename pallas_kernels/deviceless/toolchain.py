"""Where the assembler is: ptxas of the wheels that lie beside JAX's CUDA plugin, never that of the machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

PLUGINS: Mapping[str, tuple[str, str]] = {"cuda13": ("nvidia/cu13/bin/ptxas", "13.0.0"), "cuda12": ("nvidia/cuda_nvcc/bin/ptxas", "12.9.0")}
"""Of each plugin: where its assembler's wheel puts ptxas, and the CUDA version that goes with it."""


class ToolchainMissing(Exception):
    """JAX's CUDA plugin or its ptxas is not importable here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """What compiles: the plugin's name, its ptxas, and the CUDA version to name to XLA."""

    plugin: str
    ptxas: Path
    cuda_version: str


def find_toolchain() -> Toolchain:
    """The toolchain on Python's path.

    Raises:
        ToolchainMissing: none, or only half of one.
    """
    for plugin, (place, version) in PLUGINS.items():
        if importlib.util.find_spec(f"jax_{plugin}_plugin") is None:
            continue
        for folder in sys.path:
            ptxas = Path(folder or ".") / place
            if ptxas.exists():
                return Toolchain(plugin=plugin, ptxas=ptxas, cuda_version=version)
        raise ToolchainMissing(f"jax-{plugin}-plugin is installed, but not the wheel with its assembler: no {place} on Python's path")
    raise ToolchainMissing(
        f"compiling for GPUs needs one of JAX's CUDA plugins on Python's path ({', '.join(PLUGINS)}): "
        "run scripts/gpu_toolchain.sh and put the folder that it prints on PYTHONPATH, or install jaxinfer[cuda13]"
    )


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a subprocess that compiles with the toolchain in `folder`, and with no other.

    JAX_PLATFORMS is cpu: the plugin is then registered and its library loaded, but no driver is looked for.
    """
    places = [folder / place for place, _ in PLUGINS.values()]
    binaries = [str(place.parent) for place in places if place.exists()]
    path = os.pathsep.join([*binaries, base.get("PATH", os.defpath)])
    modules = os.pathsep.join([str(folder), *filter(None, [base.get("PYTHONPATH")])])
    return {**base, "JAX_PLATFORMS": "cpu", "PATH": path, "PYTHONPATH": modules}


@contextlib.contextmanager
def assembler_first(toolchain: Toolchain) -> Generator[None]:
    """While it lasts, the wheel's ptxas is the first on PATH: Mosaic asks that one which PTX it understands."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([str(toolchain.ptxas.parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
