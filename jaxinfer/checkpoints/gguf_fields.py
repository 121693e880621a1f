"""Typed access to the metadata of a GGUF file's architecture (`llama.block_count`, …), which remembers what was used.

Strict: a field that is neither used nor known to be harmless raises, since it may change the formula. Key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `Keys` in gguf.constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxinfer.checkpoints.gguf_header import GGUFHeader
from jaxinfer.errors import CheckpointError, UnsupportedModelError

IGNORED_KEYS = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
MAX_SIZE = 2**31 - 1
MIN_REAL, MAX_REAL = 1e-30, 1e30


class Fields:
    """The metadata fields under one architecture's prefix."""

    def __init__(self, header: GGUFHeader, architecture: str):
        self.header, self.prefix = header, architecture + "."
        self._used: set[str] = set()

    def fail(self, key: str, message: str) -> CheckpointError:
        """An error that names the file and the field."""
        return CheckpointError(message, file=str(self.header.path), field=self.prefix + key)

    def unsupported(self, key: str, message: str) -> UnsupportedModelError:
        """An error for a field that makes sense, but is not implemented."""
        return UnsupportedModelError(f"{self.header.path}: {self.prefix}{key} {str(self.get(key))[:60]!r} {message}")

    def get(self, key: str) -> Any:
        """Whatever stands there, None when the file has no such field."""
        self._used.add(key)
        return self.header.metadata.get(self.prefix + key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.fail(key, "the field is missing")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # some writers repeat a value for each layer
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_SIZE:
            raise self.fail(key, f"must be an integer from 1 to {MAX_SIZE}, got {str(value)[:60]}")
        return value

    def optional_size(self, key: str) -> int | None:
        """A positive integer; None where the field is missing or zero."""
        return None if self.get(key) in (None, 0) else self.size(key)

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal that is the same float32 (1e-05, not 9.99999974e-06)."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.fail(key, "the field is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_REAL <= value <= MAX_REAL:
            raise self.fail(key, f"must be a number from {MIN_REAL} to {MAX_REAL}, got {str(value)[:60]}")
        return shortest(value)

    def check_all_used(self) -> None:
        """Refuse fields that nothing has asked for.

        Raises:
            UnsupportedModelError: naming the first one.
        """
        for key in self.header.metadata:
            name = key.removeprefix(self.prefix)
            if name != key and name not in self._used and name not in IGNORED_KEYS:
                raise self.unsupported(name, "is not supported")


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32."""
    return float(str(np.float32(value)))
