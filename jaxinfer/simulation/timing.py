"""How long a step and a copy take: a roofline with documented figures, or figures of one's own from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType

from jaxinfer.errors import ConfigError


def _figure(meaning: str) -> float:
    return field(metadata={"help": meaning})


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step has to do."""

    num_tokens: int
    num_pairs: int
    """Pairs of a query and a key it attends to: a row of n tokens behind s others has n * s + n * (n + 1) / 2 of them."""
    num_context_tokens: int
    """Tokens whose KV the step reads: for every row all up to its end."""
    num_copied_bytes: float = 0.0
    """KV bytes that are copied within the device: to and from staging memory, or from block to block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A device with a model on it. Rates are what is reached, not what a data sheet promises.

    Raises:
        ConfigError: for a figure that is not a number, or below what makes sense.
    """

    flops_per_token: float = _figure("floating-point operations of a token outside attention: twice the weights it meets")
    flops_per_pair: float = _figure("those of one query and one key: 4 x query heads x head dimension x layers")
    flops_per_second: float = _figure("floating-point operations per second that prompts reach")
    weight_bytes: float = _figure("bytes of weights that every step reads")
    kv_bytes_per_token: float = _figure("KV bytes of a token in all layers")
    memory_bytes_per_second: float = _figure("bytes per second that decoding reaches")
    overhead_seconds: float = _figure("what every step takes beside that on the device: launches, sampling")
    host_seconds: float = _figure("the host's part of a step; with async scheduling it only counts where it is the longer one")
    host_link_bytes_per_second: float = _figure("between device and host, each way")
    disk_bytes_per_second: float = _figure("of the disk tier, each way")
    kv_memory_bytes: float = _figure("memory of the device that the KV pool may take")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            may_be_zero = one.name in ("overhead_seconds", "host_seconds", "flops_per_pair")
            if not is_number or value < 0 or (value == 0 and not may_be_zero):
                allowed = "a number of at least 0" if may_be_zero else "a number above 0"
                raise ConfigError(f"--timing: {one.name} must be {allowed}, got {value!r:.80}", option="--timing")

    def step_seconds(self, work: StepWork) -> float:
        """Time on the device: the longer of computing and reading, the copies, and the fixed part."""
        compute = (work.num_tokens * self.flops_per_token + work.num_pairs * self.flops_per_pair) / self.flops_per_second
        memory = (self.weight_bytes + work.num_context_tokens * self.kv_bytes_per_token) / self.memory_bytes_per_second
        copies = 2 * work.num_copied_bytes / self.memory_bytes_per_second  # read and written
        return max(compute, memory) + copies + self.overhead_seconds


H200_LLAMA_8B = Timing(
    flops_per_token=15.0e9,
    flops_per_pair=524_288,
    flops_per_second=500e12,
    weight_bytes=15.0e9,
    kv_bytes_per_token=131_072,
    memory_bytes_per_second=3.6e12,
    overhead_seconds=0.5e-3,
    host_seconds=2e-3,
    host_link_bytes_per_second=45e9,
    disk_bytes_per_second=3e9,
    kv_memory_bytes=100e9,
)
"""Llama 3.1 8B in bfloat16 (7.5e9 weights beside the input embedding; 32 layers, 32 query and 8 KV heads of 128) on an H200.

The data sheet says 989 TFLOP/s dense, 4.8 TB/s, 141 GB and PCIe 5 x16 (64 GB/s); taken are half of the first, three
quarters of the second, 70 % of the last. These are estimates, not measurements.
"""
CPU_SMOLLM2 = Timing(
    flops_per_token=269e6,
    flops_per_pair=69_120,
    flops_per_second=112e9,
    weight_bytes=538e6,
    kv_bytes_per_token=46_080,
    memory_bytes_per_second=20e9,
    overhead_seconds=1e-3,
    host_seconds=1e-3,
    host_link_bytes_per_second=5e9,
    disk_bytes_per_second=1e9,
    kv_memory_bytes=2 * 2**30,
)
"""SmolLM2-135M in float32 (30 layers, 9 query and 3 KV heads of 64) on the 2-core Xeon of the README.

The rates give the README's tokens/s of one and of 32 sequences within a tenth; eight sequences are in truth 1.8 times slower.
"""
PROFILES: Mapping[str, Timing] = MappingProxyType({"h200-llama-8b": H200_LLAMA_8B, "cpu-smollm2": CPU_SMOLLM2})


def load_timing(name: str) -> Timing:
    """A profile by its name, or a JSON file with the fields of `Timing`; `"like": "PROFILE"` takes the missing ones from there.

    Raises:
        ConfigError: for an unknown name, or a file that is not that.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--timing must be one of {', '.join(PROFILES)} or a JSON file, got {name!r:.200}", option="--timing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--timing {name!r} cannot be read as JSON: {error}", option="--timing") from error
    return _from_json(name, content)


def _from_json(name: str, content: object) -> Timing:
    if not isinstance(content, dict):
        raise ConfigError(f"--timing {name!r} must hold one object, got {type(content).__name__}", option="--timing")
    given = dict(content)
    like = given.pop("like", None)
    if like is not None and like not in PROFILES:
        raise ConfigError(f"--timing {name!r}: like must be one of {', '.join(PROFILES)}, got {like!r:.80}", option="--timing")
    known = [one.name for one in fields(Timing)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"--timing {name!r} has unknown figures {', '.join(unknown)}; known: {', '.join(known)}", option="--timing")
    whole = {key: getattr(PROFILES[like], key) for key in known} | given if like is not None else given
    missing = [key for key in known if key not in whole]
    if missing:
        raise ConfigError(f"--timing {name!r} lacks {', '.join(missing)}; give them, or a profile in `like`", option="--timing")
    return Timing(**whole)
