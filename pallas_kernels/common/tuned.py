"""Tile sizes that were measured to be fastest: one table per operation and device kind, shipped with the package.

`pallas_kernels/<operation>/tuned/<device kind>.json`, written by `python -m pallas_kernels.tune`. How a kernel takes part:

    def pick_config(num_rows: int, head_dim: int, device: Device) -> Config:
        found = tuned.lookup("paged_attention", device.kind, tuned.key("decode", rows=tuned.bucket(num_rows), head_dim=head_dim))
        if found is not None:
            return Config(**found)
        ...  # the rule for shapes that nobody measured

    CANDIDATES = (Config(tile_k=64), Config(tile_k=128))  # in the same module: what the tuner tries

The first word of a key is the kernel's name, unique in its operation; the rest is what the best tiles depend on, coarse
enough that a table covers the shapes between the measured ones. A candidate that raises `UnsupportedByKernel`, does not
compile or gives other numbers than the reference is left out.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


@dataclass(slots=True)
class Trial:
    """A configuration that stands in for the tables of an operation; see `trying`.

    Attributes:
        keys: what the kernel looked up meanwhile.
    """

    operation: str
    kernel: str | None
    config: Mapping[str, Any] | None
    keys: list[str] = field(default_factory=list)


_TRIAL: ContextVar[Trial | None] = ContextVar("trial", default=None)


def key(kernel: str, **shape: int | str) -> str:
    """A table's key: the kernel's name, then what its tiles depend on, `decode rows=32 head_dim=128`."""
    return " ".join([kernel, *(f"{name}={value}" for name, value in shape.items())])


def bucket(size: int) -> int:
    """The power of two at or above a size: one entry serves all sizes of a bucket."""
    return 1 << max(0, size - 1).bit_length()


def lookup(operation: str, device_kind: str, key: str) -> dict[str, Any] | None:
    """The fields of the measured `Config`, or None where nothing was measured; call it while a kernel is traced.

    Args:
        operation: the folder's name, `paged_attention`.
        device_kind: as JAX names it, `NVIDIA H200`.
        key: made by `key`.
    """
    trial = _TRIAL.get()
    if trial is not None and trial.operation == operation and trial.kernel in (None, key.split(" ", 1)[0]):
        trial.keys.append(key)
        return dict(trial.config) if trial.config is not None else None
    entry = read_table(table_path(operation, device_kind)).get(key)
    return dict(entry["config"]) if entry is not None else None


@contextlib.contextmanager
def trying(operation: str, kernel: str | None, config: Mapping[str, Any] | None) -> Generator[Trial]:
    """Inside, `lookup` gives this configuration for every key of the kernel, or of all the operation's; None: there is no table.

    What is traced inside keeps it, so trace functions that were not jitted before.
    """
    trial = Trial(operation, kernel, config)
    token = _TRIAL.set(trial)
    try:
        yield trial
    finally:
        _TRIAL.reset(token)


def table_path(operation: str, device_kind: str, package: Path = PACKAGE) -> Path:
    """Where the table of an operation lies for a device kind, whether it is there or not."""
    return package / operation / "tuned" / f"{re.sub(r'[^a-z0-9]+', '_', device_kind.lower()).strip('_')}.json"


@functools.lru_cache(maxsize=64)
def read_table(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """By key, an entry with `config` and what was measured; empty where there is no table."""
    return json.loads(path.read_text()) if path.exists() else {}
