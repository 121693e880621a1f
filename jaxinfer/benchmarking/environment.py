"""Where and with what a measurement was made, as plain values for its JSON line."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jaxinfer

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def describe_environment() -> dict[str, Any]:
    """Date (UTC), machine and versions. `load_average` is what else the machine was doing in the minute before."""
    import jax  # here, as the command line is built without it

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "num_usable_processors": len(os.sched_getaffinity(0)),
            "devices": [device.device_kind for device in jax.devices()],
            "load_average": round(os.getloadavg()[0], 2),
        },
        "versions": {"jaxinfer": jaxinfer.__version__, "python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }


def _processor() -> str:
    """The model's name as Linux tells it; what Python knows (often only the architecture) elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
