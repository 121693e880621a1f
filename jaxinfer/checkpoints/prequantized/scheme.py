"""What the formats of quantized checkpoints have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.checkpoints.source import LazyTensor, PackedTensor
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.quant.weight import QuantizedWeight

FLOATS = ("float16", "bfloat16", "float32")
ACTIVATION_SCALES = (".input_scale", ".input_zero_point")
"""The ends of the names of fixed scales that activations were to be rounded with. They are left alone: activations stay floats."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """An object of config.json; `path` is where it stands."""

    values: Mapping[str, Any]
    path: str
    file: str

    def require(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """The value of a key, which must be one of those allowed.

        Raises:
            UnsupportedModelError: it is another one.
        """
        value = self.values.get(key, default)
        # 1 == True and 0 == False, which JSON tells apart.
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise self.refuse(key, f"must be {' or '.join(map(repr, allowed))}, got {str(value)[:80]!r}")
        return value

    def require_empty(self, *keys: str) -> None:
        """Refuse what is there: it would change the model.

        Raises:
            UnsupportedModelError: naming the key.
        """
        for key in keys:
            if self.values.get(key):
                raise self.refuse(key, f"is not implemented, got {str(self.values[key])[:80]!r}")

    def size(self, key: str) -> int:
        """A positive integer.

        Raises:
            UnsupportedModelError: it is none.
        """
        value = self.values.get(key)
        if type(value) is not int or value <= 0:
            raise self.refuse(key, f"must be a positive integer, got {str(value)[:80]!r}")
        return value

    def group_size(self, key: str = "group_size") -> int:
        """A positive integer, or 0 for -1: the whole row.

        Raises:
            UnsupportedModelError: it is none.
        """
        return 0 if self.values.get(key) == -1 else self.size(key)

    def inner(self, key: str) -> Settings:
        """An object inside this one.

        Raises:
            UnsupportedModelError: it is none.
        """
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.refuse(key, f"must be an object, got {str(value)[:80]!r}")
        return Settings(value, f"{self.path}.{key}", self.file)

    def refuse(self, key: str, message: str) -> UnsupportedModelError:
        """The error about a key."""
        return UnsupportedModelError(f"{self.file}: {self.path}.{key} {message}")


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of one quantized matrix, by the ends of their names."""

    stem: str
    file: str
    parts: Mapping[str, LazyTensor]

    def need(self, suffix: str, dtypes: Sequence[str], num_dims: int | Sequence[int] = 2) -> LazyTensor:
        """A tensor that must be there.

        Raises:
            CheckpointError: it is missing, or of another dtype or number of dimensions.
        """
        tensor = self.parts.get(suffix)
        if tensor is None:
            raise self.fault(suffix, "this tensor is missing")
        if tensor.dtype not in dtypes:
            raise self.fault(suffix, f"its dtype must be {' or '.join(dtypes)}, got {tensor.dtype}")
        allowed = (num_dims,) if isinstance(num_dims, int) else num_dims
        if len(tensor.shape) not in allowed:
            raise self.fault(suffix, f"it must have {' or '.join(map(str, allowed))} dimensions, got {list(tensor.shape)}")
        return tensor

    def check_shape(self, suffix: str, *allowed: Shape) -> None:
        """Refuse a tensor of another shape.

        Raises:
            CheckpointError: naming it.
        """
        if self.parts[suffix].shape not in allowed:
            wanted = " or ".join(str(list(shape)) for shape in allowed)
            raise self.fault(suffix, f"its shape must be {wanted} to fit the others, got {list(self.parts[suffix].shape)}")

    def num_groups(self, suffix: str, num_inputs: int, group_size: int) -> int:
        """Groups in a row.

        Raises:
            CheckpointError: they do not divide it.
        """
        if group_size and num_inputs % group_size:
            raise self.fault(suffix, f"groups of {group_size} do not divide its {num_inputs} inputs")
        return num_inputs // group_size if group_size else 1

    def read(self, suffix: str) -> np.ndarray:
        """The values of a tensor."""
        return self.parts[suffix].read()

    def fault(self, suffix: str, message: str) -> CheckpointError:
        """The error about a tensor."""
        return CheckpointError(message, file=self.file, field=self.stem + suffix)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a format names and stores a matrix."""

    marker: str
    """The end of the name of the tensor that makes a matrix a quantized one."""
    others: tuple[str, ...]
    """The ends of the names of what goes with it."""
    build: Callable[[Stored], LazyTensor]
    """Checks the parts and makes the plain tensor."""
    plain: str = ".weight"
    """The end of the plain tensor's name."""
    is_quantized: Callable[[LazyTensor], bool] = lambda tensor: True
    """Whether the marked tensor is a quantized one, where plain ones have the same name."""


def packed_tensor(shape: Shape, abstract: QuantizedWeight, read: Callable[[], QuantizedWeight]) -> LazyTensor:
    """A matrix that is stored quantized and read as float32."""
    return LazyTensor(shape, "float32", lambda: read().dequantize(), PackedTensor(abstract, read))
