"""A quantized weight as JSON and arrays: what a manifest says of it, and the weight again from the two.

Only the types in KINDS are made, whatever a file names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import prod
from typing import Any

import numpy as np

from jaxinfer.checkpoints.safetensors import DTYPES

KINDS: Mapping[str, str] = {
    "Int8Weight": "jaxinfer.quant.int8",
    "PackedWeight": "jaxinfer.quant.packed",
    "PackedMatrix": "pallas_kernels.packed_matmul",
}
"""Type -> the module that has it."""
DTYPES_BY_NAME: Mapping[str, np.dtype] = {dtype.name: dtype for dtype in DTYPES.values()}
MAX_DIMS = 8
MAX_NUMBERS = 256


class DescriptionError(Exception):
    """A description makes no sense; the caller knows file and tensor."""


def describe(weight: Any) -> dict[str, Any]:
    """The weight's type, its fixed numbers, and shape and dtype of each array."""
    described: dict[str, Any] = {"kind": type(weight).__name__}
    for field in fields(weight):
        value = getattr(weight, field.name)
        if is_dataclass(value):
            described[field.name] = describe(value)
        elif hasattr(value, "shape"):
            described[field.name] = {"shape": list(value.shape), "dtype": np.dtype(value.dtype).name}
        elif value is not None:
            described[field.name] = list(value) if isinstance(value, tuple) else value
    return described


def parts_of(weight: Any, prefix: str = "") -> dict[str, Any]:
    """The weight's arrays by path: `matrix.codes`, `matrix.scales`, …"""
    found: dict[str, Any] = {}
    for field in fields(weight):
        value = getattr(weight, field.name)
        if is_dataclass(value):
            found |= parts_of(value, f"{prefix}{field.name}.")
        elif hasattr(value, "shape"):
            found[prefix + field.name] = value
    return found


def described_parts(described: Any, prefix: str = "") -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each array by path.

    Raises:
        DescriptionError: it is not what `describe` gives.
    """
    found: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    known = _known_fields(described)
    for name, value in described.items():
        if name not in known:
            raise DescriptionError(f"{prefix}{name} is no part of {described['kind']}")
        if isinstance(value, dict) and "kind" in value:
            found |= described_parts(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            found[prefix + name] = shape_and_dtype(value, prefix + name)
    return found


def rebuild(described: Any, parts: Mapping[str, Any], prefix: str = "") -> Any:
    """The weight of a description, with these arrays (or ShapeDtypeStructs) in it.

    Raises:
        DescriptionError: it is not what `describe` gives.
    """
    known = _known_fields(described)
    values: dict[str, Any] = {}
    for name, value in described.items():
        if name == "kind":
            continue
        if isinstance(value, dict):
            values[name] = rebuild(value, parts, f"{prefix}{name}.") if "kind" in value else parts[prefix + name]
        else:
            values[name] = _fixed(value, prefix + name)
    missing = [name for name, is_needed in known.items() if is_needed and name not in values]
    if missing:
        raise DescriptionError(f"{prefix}{missing[0]} is missing")
    return getattr(importlib.import_module(KINDS[described["kind"]]), described["kind"])(**values)


def shape_and_dtype(described: Mapping[str, Any], path: str) -> tuple[tuple[int, ...], np.dtype]:
    """`{"shape": [2, 3], "dtype": "int8"}`, checked.

    Raises:
        DescriptionError: it is something else.
    """
    shape, dtype = described.get("shape"), described.get("dtype")
    if not isinstance(shape, list) or not 0 < len(shape) <= MAX_DIMS or not all(type(size) is int and size > 0 for size in shape):
        raise DescriptionError(f"{path}: shape {str(shape)[:60]} must be a list of 1 to {MAX_DIMS} positive integers")
    if prod(shape) >= 2**63:
        raise DescriptionError(f"{path}: shape {str(shape)[:60]} is more than any memory")
    if not isinstance(dtype, str) or dtype not in DTYPES_BY_NAME:
        raise DescriptionError(f"{path}: dtype {str(dtype)[:60]!r} is not supported; supported: {', '.join(DTYPES_BY_NAME)}")
    return tuple(shape), DTYPES_BY_NAME[dtype]


def _known_fields(described: Any) -> dict[str, bool]:
    """The names that a description of this kind may have; true for those that it must have."""
    kind = described.get("kind") if isinstance(described, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise DescriptionError(f"kind {str(kind)[:60]!r} is not supported; supported: {', '.join(KINDS)}")
    made = getattr(importlib.import_module(KINDS[kind]), kind)
    return {"kind": False, **{field.name: field.default is MISSING for field in fields(made)}}


def _fixed(value: Any, path: str) -> Any:
    if type(value) is int and 0 <= value < 2**31:
        return value
    is_numbers = isinstance(value, list) and len(value) <= MAX_NUMBERS and all(type(item) in (int, float) for item in value)
    if is_numbers:
        return tuple(float(item) for item in value)
    raise DescriptionError(f"{path}: {str(value)[:60]} must be a number or a list of at most {MAX_NUMBERS}")
