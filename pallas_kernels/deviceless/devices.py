"""Facts about the GPUs that we compile for: what XLA wants to know of an absent device, and the rates that floors are computed with.

From NVIDIA's data sheets (H100 SXM, H200 SXM, A100 SXM 80GB) and the tables of compute capabilities in the CUDA C++ programming guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

GIBIBYTE = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """One model of GPU.

    Attributes:
        kind: as JAX's `device_kind` gives it.
        capability: compute capability, (major, minor).
        has_wgmma: whether it is of the 9.0a family: warpgroup matrix products and bulk tensor copies.
        num_cores: streaming multiprocessors.
        memory_bytes: what CUDA reports as total, rounded down to whole GiB.
        bandwidth: bytes per second of GPU memory.
        peak_flops: dense, per second, by the type of the factors; two per multiply-add.
        shared_bytes_per_block: what one thread block may ask for.
        shared_bytes_per_core: what a multiprocessor has.
        float_units_per_core: float32 lanes of a multiprocessor.
        l2_bytes: size of the L2 cache.
        clock_ghz: boost clock.
        num_links: NVLinks.
        host_bandwidth: bytes per second over PCIe, one way.
    """

    kind: str
    capability: tuple[int, int]
    has_wgmma: bool
    num_cores: int
    memory_bytes: int
    bandwidth: float
    peak_flops: Mapping[str, float]
    shared_bytes_per_block: int
    shared_bytes_per_core: int
    float_units_per_core: int
    l2_bytes: int
    clock_ghz: float
    num_links: int
    host_bandwidth: float

    def floor_seconds(self, *, num_bytes: float, flops: float = 0.0, peak: str = "bfloat16") -> float:
        """The least time in which so many bytes can move and so many operations be done: the larger of the two (the roofline)."""
        return max(num_bytes / self.bandwidth, flops / self.peak_flops[peak])


_HOPPER: dict[str, Any] = {
    "capability": (9, 0),
    "has_wgmma": True,
    "num_cores": 132,
    "peak_flops": MappingProxyType({"bfloat16": 989.4e12, "int8": 1978.9e12}),
    "shared_bytes_per_block": 232_448,
    "shared_bytes_per_core": 233_472,
    "float_units_per_core": 128,
    "l2_bytes": 50 << 20,
    "clock_ghz": 1.98,
    "num_links": 18,
    "host_bandwidth": 64e9,
}

DEVICES: Mapping[str, DeviceFacts] = MappingProxyType(
    {
        "h100": DeviceFacts(kind="NVIDIA H100 80GB HBM3", memory_bytes=79 * GIBIBYTE, bandwidth=3.35e12, **_HOPPER),
        "h200": DeviceFacts(kind="NVIDIA H200", memory_bytes=139 * GIBIBYTE, bandwidth=4.8e12, **_HOPPER),
        "a100": DeviceFacts(
            kind="NVIDIA A100-SXM4-80GB",
            capability=(8, 0),
            has_wgmma=False,
            num_cores=108,
            memory_bytes=79 * GIBIBYTE,
            bandwidth=2.039e12,
            peak_flops=MappingProxyType({"bfloat16": 312e12, "int8": 624e12}),
            shared_bytes_per_block=166_912,
            shared_bytes_per_core=167_936,
            float_units_per_core=64,
            l2_bytes=40 << 20,
            clock_ghz=1.41,
            num_links=12,
            host_bandwidth=32e9,
        ),
    }
)
"""By the name that commands take."""


def facts(name: str) -> DeviceFacts:
    """The facts of a device by its short name ("h200") or by JAX's `device_kind`.

    Raises:
        ValueError: no such device here.
    """
    for short, found in DEVICES.items():
        if name in (short, found.kind):
            return found
    raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")


def target_config(device: DeviceFacts, *, toolkit: str = "12.9.0", dnn: tuple[int, int, int] = (9, 10, 0)) -> str:
    """XLA's GpuTargetConfigProto as text: all that its compiler asks a device about.

    Args:
        toolkit: the CUDA version, of toolkit and driver alike.
        dnn: the version of cuDNN to assume; none needs to be there.
    """
    major, minor = device.capability
    # The instructions of 9.0a are an extension that the compiler must be told of.
    extension = " feature_extension: ACCELERATED_FEATURES" if device.has_wgmma else ""
    fields: dict[str, Any] = {
        "name": f'"{device.kind}"',
        "device_vendor": '"NVIDIA Corporation"',
        "platform_version": f'"Compute Capability {major}.{minor}{"a" if device.has_wgmma else ""}"',
        "cuda_compute_capability": f"{{ major: {major} minor: {minor}{extension} }}",
        "core_count": device.num_cores,
        "fpus_per_core": device.float_units_per_core,
        "clock_rate_ghz": device.clock_ghz,
        "device_memory_size": device.memory_bytes,
        "memory_bandwidth": round(device.bandwidth),
        "l2_cache_size": device.l2_bytes,
        "pcie_bandwidth": round(device.host_bandwidth),
        "device_interconnect_info": f"{{ active_links: {device.num_links} }}",
        "ecc_enabled": "true",
        "device_address_bits": 64,
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "registers_per_block_limit": 65_536,
        "registers_per_core_limit": 65_536,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_block_optin": device.shared_bytes_per_block,
        "shared_memory_per_core": device.shared_bytes_per_core,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "block_dim_limit_x": (1 << 31) - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "driver_version": f'"{toolkit}"',
        "runtime_version": f'"{toolkit}"',
        "compile_time_toolkit_version": f'"{toolkit}"',
        "dnn_version": f'"{".".join(map(str, dnn))}"',
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            "}",
            'platform_name: "CUDA"',
            f"dnn_version_info {{ major: {dnn[0]} minor: {dnn[1]} patch: {dnn[2]} }}",
            f'device_description_str: "{device.kind}"',
        ]
    )
