"""`jaxinfer doctor`: what is here, and what is missing. It only reports; it never fails for want of a GPU."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.command import Command

if TYPE_CHECKING:
    import jax

PACKAGES = ("jaxinfer", "jax", "jaxlib", "flax", "orbax-checkpoint", "transformers", "tokenizers", "aiohttp", "numpy")
GPU_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 0 whatever it says."""
    missing: list[str] = []
    for title, rows in (
        ("Versions", _versions(missing)),
        ("Machine", _machine()),
        ("Devices", _devices(missing)),
        ("Kernels chosen here", _kernels()),
        ("Caches", _caches()),
        ("Presets", _presets(missing)),
    ):
        _print_section(title, list(rows))
    _print_section("Missing", [("-", line) for line in missing] or [("-", "nothing")])
    return 0


def _print_section(title: str, rows: list[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    print(title)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    print()


def _versions(missing: list[str]) -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
            missing.append(f"the package {package}: run `make setup`")


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    yield "processors", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    yield (
        "memory",
        f"{format_bytes(os.sysconf('SC_AVPHYS_PAGES') * page_bytes)} free of {format_bytes(os.sysconf('SC_PHYS_PAGES') * page_bytes)}",
    )


def _devices(missing: list[str]) -> Iterator[tuple[str, str]]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:  # a backend that was asked for (JAX_PLATFORMS) or whose plugin is installed does not start
        yield "none", f"jax finds no device: {error}"
        missing.append("a device: see the message of jax under Devices")
        return
    for device in devices:
        yield str(device), _device_line(device)
    if shutil.which("nvidia-smi") and all(device.platform == "cpu" for device in devices):
        missing.append(_why_no_gpu())


def _device_line(device: jax.Device) -> str:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return device.device_kind
    used, limit = stats.get("bytes_in_use", 0), stats["bytes_limit"]
    return f"{device.device_kind}, {format_bytes(limit - used)} free of {format_bytes(limit)}"


def _why_no_gpu() -> str:
    for plugin in GPU_PLUGINS:
        try:
            return f"a GPU for jax: nvidia-smi is here and {plugin} {version(plugin)} is installed, but jax started on the CPU (JAX_PLATFORMS?)"
        except PackageNotFoundError:
            continue
    return "a GPU for jax: nvidia-smi is here, but no CUDA plugin; run `make setup EXTRAS=test,notebooks,cuda13` (or cuda12)"


def _kernels() -> Iterator[tuple[str, str]]:
    import jax

    from pallas_kernels.common import discovery, served

    for operation in discovery.operations():
        case = served.cases(operation.name, is_tiny=True)[0]
        try:
            chosen, refusals = operation.choice(jax.eval_shape(case.make, jax.random.key(0)), case.static)
        except RuntimeError:  # no backend starts, which the section on devices tells
            yield operation.name, f"of {', '.join(operation.implementations)}: unknown without a device"
            continue
        others = [name for name in operation.implementations if name != chosen]
        after = f" (refused: {'; '.join(refusals)})" if refusals else f" (then {', '.join(others)})" if others else ""
        yield operation.name, chosen + after


def _caches() -> Iterator[tuple[str, str]]:
    from jaxinfer.checkpoints.cache_dir import cache_dir

    root = cache_dir()
    yield "folder", str(root)
    if not root.is_dir():
        yield "size", "nothing yet"
        return
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        yield folder.name, f"{format_bytes(sum(sizes))} in {len(sizes)} files"


def _presets(missing: list[str]) -> Iterator[tuple[str, str]]:
    from jaxinfer.checkpoints.pull import PRESETS

    for preset in PRESETS:
        path: Path = preset.path()
        if path.is_file():
            yield preset.name, str(path)
        else:
            yield preset.name, "not here"
            missing.append(f"the weights of {preset.name}: they come on first use, or with `jaxinfer pull {preset.name}`")


def format_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


COMMAND = Command("doctor", "show versions, devices, kernels and caches, and what is missing", add_arguments, run)
