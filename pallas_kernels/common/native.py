"""Building and loading kernels in C++ for the CPU, as XLA FFI targets."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib

from pallas_kernels.common.dispatch import UnsupportedByKernel
from pallas_kernels.common.mosaic import device

COMPILERS = ("g++", "clang++")
# No -ffast-math: results must not depend on what surrounds a loop, and linking with it changes the process's rounding of
# denormals. The sources spell their vectors out.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-w")
HEADERS = Path(__file__).parent
"""Where the headers are that the sources share."""


@functools.lru_cache(maxsize=64)
def register(source: Path, symbol: str) -> str:
    """Build `source` if it has not been built on this machine, and register `symbol` with XLA; returns the target's name.

    Raises:
        UnsupportedByKernel: not on a CPU, no C++ compiler, or the compiler fails.
    """
    if (target := device().kind) != "cpu":
        raise UnsupportedByKernel(f"runs on a CPU, this is {target}")
    library = ctypes.cdll.LoadLibrary(str(_build(source)))
    name = f"pallas_kernels.{symbol}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return name


def _build(source: Path) -> Path:
    """The shared library of a source, in the user's cache folder, named by everything that decides its content."""
    from platformdirs import user_cache_dir  # late: with a GPU nothing is built

    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise UnsupportedByKernel(f"no C++ compiler found ({', '.join(COMPILERS)})")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    headers = [header.read_text() for folder in (HEADERS, source.parent) for header in sorted(folder.glob("*.h"))]
    parts = (source.read_text(), *headers, version, " ".join(FLAGS), jaxlib.__version__, platform.machine(), _cpu_features())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    library = Path(user_cache_dir("pallas_kernels")) / f"{source.parent.name}-{digest}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        folder = library.parent
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="pallas_kernels-"))
        library = folder / library.name
    # Another process may build the same file: each writes its own and the rename decides.
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=folder)
    os.close(handle)
    command = [compiler, *FLAGS, f"-I{HEADERS}", f"-I{jax.ffi.include_dir()}", str(source), "-o", unfinished]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        os.unlink(unfinished)
        raise UnsupportedByKernel(f"{compiler} failed on {source.name}: {built.stderr.strip()[-500:]}")
    os.replace(unfinished, library)
    return library


def _cpu_features() -> str:
    """What -march=native sees: a cache folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
