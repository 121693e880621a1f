"""Launching Mosaic GPU kernels: on Hopper, in the interpreter when it was asked for, and nowhere else.

What needs JAX's Mosaic is imported when a kernel runs: it takes half a second, which a start without kernels does not pay.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.common.dispatch import UnsupportedByKernel

HOPPER_KINDS = ("H100", "H200", "GH200", "H800", "H20")
H200_CORES = 132


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What is compiled for.

    Attributes:
        kind: as JAX names it, "NVIDIA H200"; "cpu".
        num_cores: streaming multiprocessors; of an H200 where nothing says.
    """

    kind: str
    num_cores: int

    @property
    def is_hopper(self) -> bool:
        """Whether it has wgmma and TMA as compute capability 9.0a defines them."""
        return any(kind in self.kind for kind in HOPPER_KINDS)


def device() -> Device:
    """The device of the mesh that is being traced under (its devices need not exist), else JAX's default one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(kind=abstract.device_kind, num_cores=abstract.num_cores or H200_CORES)
    default = jax.devices()[0]
    return Device(kind=default.device_kind, num_cores=getattr(default, "core_count", None) or H200_CORES)


def is_interpreted(interpret: bool) -> bool:
    """Whether a kernel runs in the interpreter: there is no Hopper GPU, and `interpret` says that this will do.

    Raises:
        UnsupportedByKernel: there is none and it will not.
    """
    target = device()
    if target.is_hopper:
        return False
    if not interpret:
        raise UnsupportedByKernel(f"needs a Hopper GPU (H100, H200), this is {target.kind}")
    return True


def late(module: str, function: str) -> Callable[..., Any]:
    """A Mosaic implementation that is imported when it first runs on a device for it; elsewhere it refuses, see `is_interpreted`."""

    def run(*args: Any, interpret: bool = False, **options: Any) -> Any:
        is_interpreted(interpret)
        return getattr(importlib.import_module(module), function)(*args, interpret=interpret, **options)

    return run


def kernel(body: Callable[..., None], *, interpret: bool, **options: Any) -> Callable[..., Any]:
    """`plgpu.kernel(body, **options)` for the device that is being traced for.

    Args:
        interpret: where there is no Hopper GPU, run in Pallas' GPU interpreter instead of refusing.

    Raises:
        UnsupportedByKernel: neither a Hopper GPU nor the interpreter.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not is_interpreted(interpret):
        return plgpu.kernel(body, **options)
    from pallas_kernels.common import interpreter

    _check_threads(options.get("num_threads") or 1)
    interpreter.extend()
    return plgpu.kernel(body, interpret=plgpu.InterpretGPUParams(), **options)


def _check_threads(num_warpgroups: int) -> None:
    """Refuse what would hang: warpgroups wait for each other on threads of JAX's pool, which has one for each core or CPU device."""
    num_threads = max(os.cpu_count() or 1, jax.local_device_count("cpu"))
    if num_threads <= num_warpgroups:
        raise UnsupportedByKernel(
            f"the interpreter needs {num_warpgroups + 1} threads and JAX has {num_threads} here; "
            f'jax.config.update("jax_num_cpu_devices", {num_warpgroups + 1}) before its first use gives it more'
        )
