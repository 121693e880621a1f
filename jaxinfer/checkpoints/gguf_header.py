"""Read and check the header of a GGUF file.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf library's own reader slices
past the end of a damaged file without a word and takes seconds for a vocabulary (an array object per string), so the
header is walked here with every count and offset checked against the file's size; types, sizes and dequantisation come
from the library.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from jaxinfer.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MIN_FIELD_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
MAX_NAME_BYTES = 2**16 - 1
MAX_TENSORS, MAX_FIELDS = 2**17, 2**16
MAX_ARRAY_ITEMS = 2**22
"""Of all arrays together. The largest vocabularies have 0.3 million tokens, as many scores and types, and 0.5 million merges."""

SCALAR_TYPES: Mapping[GGUFValueType, np.dtype] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in numpy's order (GGUF stores the fastest dimension first)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata as plain Python values (arrays as lists), and where the tensors lie."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read metadata and tensor positions; every tensor is known to lie within the file afterwards.

    Raises:
        CheckpointError: not a GGUF file of version 2 or 3, or damaged; names the field or tensor.
    """
    try:
        with path.open("rb") as file:
            if not (size := path.stat().st_size):
                raise CheckpointError("the file is empty", file=str(path))
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as buffer:
                return _read_header(_Cursor(buffer, size, str(path)), path)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from error


class _Cursor:
    """Walks the bytes of a header; `field` is what an error names."""

    def __init__(self, buffer: mmap.mmap, size: int, file: str):
        self.buffer, self.size, self.file = buffer, size, file
        self.position = 0
        self.num_items = 0
        self.field = "header"

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.file, field=self.field)

    def take(self, num_bytes: int) -> int:
        """Step over `num_bytes`; gives where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.fail(f"truncated: {num_bytes} bytes needed at offset {start}, the file has {self.size}")
        self.position = start + num_bytes
        return start

    def number(self, form: str) -> int:
        return struct.unpack_from("<" + form, self.buffer, self.take(struct.calcsize("<" + form)))[0]

    def count(self, what: str, min_bytes: int, maximum: int) -> int:
        """A 64-bit count of at most `maximum` things that take at least `min_bytes` each."""
        count = self.number("Q")
        if count * min_bytes > self.size - self.position:
            raise self.fail(f"{what} is {count}, more than the file's {self.size} bytes can hold")
        if count > maximum:
            raise self.fail(f"{what} is {count}; at most {maximum} are allowed")
        return count

    def array_length(self, min_bytes: int) -> int:
        """The length of an array; all arrays together are bounded."""
        count = self.count("the array's length", min_bytes, MAX_ARRAY_ITEMS - self.num_items)
        self.num_items += count
        return count

    def string(self, max_bytes: int | None = None) -> str:
        length = self.number("Q")
        if max_bytes is not None and length > max_bytes:
            raise self.fail(f"a name of {length} bytes; at most {max_bytes} are allowed")
        start = self.take(length)
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"a string at offset {start} is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        return [self.string() for _ in range(count)]

    def value(self, kind_number: int) -> Any:
        kind = self.value_type(kind_number)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalars(kind, 1)[0]
        item_kind = self.value_type(self.number("I"))
        if item_kind == GGUFValueType.ARRAY:
            raise self.fail("an array of arrays is not supported")
        if item_kind == GGUFValueType.STRING:
            return self.strings(self.array_length(8))
        return self.scalars(item_kind, self.array_length(SCALAR_TYPES[item_kind].itemsize))

    def scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = SCALAR_TYPES[kind]
        start = self.take(count * dtype.itemsize)
        return np.frombuffer(self.buffer[start : self.position], dtype=dtype).tolist()

    def value_type(self, number: int) -> GGUFValueType:
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self.fail(f"unknown value type {number}; allowed are 0 to {max(GGUFValueType)}") from error


def _read_header(cursor: _Cursor, path: Path) -> GGUFHeader:
    magic = cursor.buffer[: len(MAGIC)]
    if magic != MAGIC:
        raise CheckpointError(f"not a GGUF file: it starts with {magic!r}, not {MAGIC!r}", file=cursor.file, field="magic")
    cursor.take(len(MAGIC))
    cursor.field = "version"
    version = cursor.number("I")
    if version not in VERSIONS:
        big_endian = " (a big-endian file; only little-endian is supported)" if version & 0xFFFF == 0 and version else ""
        raise cursor.fail(f"GGUF version {version}{big_endian}; supported are {', '.join(map(str, VERSIONS))}")
    cursor.field = "tensor_count"
    num_tensors = cursor.count("the number of tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
    cursor.field = "kv_count"
    num_fields = cursor.count("the number of metadata fields", MIN_FIELD_BYTES, MAX_FIELDS)
    metadata = _read_metadata(cursor, num_fields)
    infos = _read_tensor_infos(cursor, num_tensors)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    cursor.field = "general.alignment"
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"must be a power of two, got {alignment!r}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: _place_tensor(cursor, name, info, data_start, alignment) for name, info in infos.items()}
    _check_overlap(cursor, tensors)
    return GGUFHeader(path=path, metadata=metadata, tensors=tensors)


def _read_metadata(cursor: _Cursor, num_fields: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_fields):
        cursor.field = f"metadata field {index}"
        key = cursor.string(MAX_NAME_BYTES)
        cursor.field = key
        if key in metadata:
            raise cursor.fail("the metadata has this field twice")
        metadata[key] = cursor.value(cursor.number("I"))
    return metadata


def _read_tensor_infos(cursor: _Cursor, num_tensors: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Name -> (dimensions as stored, type number, offset)."""
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for index in range(num_tensors):
        cursor.field = f"tensor {index}"
        name = cursor.string(MAX_NAME_BYTES)
        cursor.field = name
        if name in infos:
            raise cursor.fail("the file has this tensor twice")
        num_dims = cursor.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.fail(f"{num_dims} dimensions; allowed are 1 to {MAX_DIMS}")
        dims = tuple(cursor.number("Q") for _ in range(num_dims))
        infos[name] = (dims, cursor.number("I"), cursor.number("Q"))
    return infos


def _place_tensor(cursor: _Cursor, name: str, info: tuple[tuple[int, ...], int, int], data_start: int, alignment: int) -> GGUFTensor:
    dims, kind_number, offset = info
    cursor.field = name
    try:
        kind = GGMLQuantizationType(kind_number)
    except ValueError as error:
        raise cursor.fail(f"unknown tensor type {kind_number}") from error
    block_size, type_size = GGML_QUANT_SIZES[kind]
    if 0 in dims or dims[0] % block_size:
        raise cursor.fail(f"dimensions {dims} do not fit {kind.name}, whose rows come in blocks of {block_size}")
    if offset % alignment:
        raise cursor.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
    num_bytes = prod(dims) // block_size * type_size
    if data_start + offset + num_bytes > cursor.size:
        raise cursor.fail(f"truncated: the tensor ends at byte {data_start + offset + num_bytes}, the file has {cursor.size}")
    return GGUFTensor(shape=dims[::-1], kind=kind, offset=data_start + offset, num_bytes=num_bytes)


def _check_overlap(cursor: _Cursor, tensors: Mapping[str, GGUFTensor]) -> None:
    in_order = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (before, first), (name, second) in pairwise(in_order):
        if first.offset + first.num_bytes > second.offset:
            cursor.field = name
            raise cursor.fail(
                f"overlaps tensor {before!r}: starts at byte {second.offset}, that one ends at {first.offset + first.num_bytes}"
            )
