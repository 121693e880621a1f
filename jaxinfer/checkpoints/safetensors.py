"""Safetensors files and folders, read lazily and written tensor by tensor.

Format: https://huggingface.co/docs/safetensors. The header is parsed here, not by the safetensors library: that one maps the
file, has no numpy type for bfloat16, and names neither file nor tensor when something is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.json_file import MAX_JSON_BYTES, parse_json_object, read_json_file
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.checkpoints.stored_bytes import read_stored_bytes
from jaxinfer.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
LENGTH_BYTES = 8
MAX_HEADER_BYTES = MAX_JSON_BYTES
METADATA_KEY = "__metadata__"
MAX_DIMS = 8

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


def open_safetensors_folder(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of a folder with `model.safetensors`, or with `model.safetensors.index.json` and its shards.

    Every header is read and checked, no weights are.

    Raises:
        CheckpointError: a file is missing, damaged, or disagrees with the index; only pickles are there.
    """
    if (folder / SINGLE_FILE).exists():
        return open_safetensors(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).exists():
        raise _no_weights(folder)
    return _open_shards(folder)


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file, in the order of their data.

    Raises:
        CheckpointError: naming the file and, where one is to blame, the tensor.
    """
    header, data_start, data_bytes = _read_header(path)
    spans = {name: _span(path, name, entry) for name, entry in header.items() if name != METADATA_KEY}
    in_order = sorted(spans.items(), key=lambda item: item[1][2])
    _check_layout(path, [(name, begin, end) for name, (_, _, begin, end) in in_order], data_bytes)
    return {
        name: LazyTensor(shape, dtype.name, partial(_read, path, name, dtype, shape, data_start + begin, end - begin))
        for name, (dtype, shape, begin, end) in in_order
    }


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor], dtype: np.dtype | None = None) -> int:
    """Write one file, a tensor in memory at a time; gives its size in bytes.

    Args:
        dtype: what tensors of real numbers are converted to; integers, and everything when it is None, stay as they are.
    """
    names = {kind.name: tag for tag, kind in DTYPES.items()}
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        kind = written_dtype(tensor, dtype)
        end = position + prod(tensor.shape) * kind.itemsize
        header[name] = {"dtype": names[kind.name], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the weights are aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for tensor in tensors.values():
            values = np.ascontiguousarray(tensor.read().astype(written_dtype(tensor, dtype), copy=False))
            file.write(values.reshape(-1).view(np.uint8).data)
        return file.tell()


def write_safetensors_folder(folder: Path, tensors: Mapping[str, LazyTensor], dtype: np.dtype, max_shard_bytes: int) -> None:
    """Write `model.safetensors`, or shards of at most `max_shard_bytes` (or of one tensor) and the index that names them."""
    shards: list[dict[str, LazyTensor]] = [{}]
    num_bytes, total = 0, 0
    for name, tensor in tensors.items():
        size = prod(tensor.shape) * written_dtype(tensor, dtype).itemsize
        if shards[-1] and num_bytes + size > max_shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes, total = num_bytes + size, total + size
    if len(shards) == 1:
        write_safetensors(folder / SINGLE_FILE, shards[0], dtype)
        return
    shard_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, dtype)
        shard_of |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": shard_of}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def written_dtype(tensor: LazyTensor, dtype: np.dtype | None) -> np.dtype:
    """What a tensor is written as: real numbers as `dtype`, integers, and everything when it is None, as they are."""
    stored = np.dtype(tensor.dtype)
    return stored if dtype is None or stored.kind in "iub" else dtype


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return CheckpointError(
            f"only pickled weights ({', '.join(pickles[:3])}); loading a pickle runs code, so it is refused: convert it to safetensors",
            file=str(folder),
        )
    others = [name for name in names if name.endswith(".safetensors")]
    found = f"; found {', '.join(others[:3])}" if others else ""
    return CheckpointError(f"the folder has neither {SINGLE_FILE} nor {INDEX_FILE}{found}", file=str(folder))


def _open_shards(folder: Path) -> dict[str, LazyTensor]:
    index = folder / INDEX_FILE
    shard_of = read_json_file(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError("must be an object that maps tensors to files", file=str(index), field="weight_map")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{str(shard)[:200]!r} is not the name of a safetensors file", file=str(index), field=f"weight_map: {name}"
            )
    shards = {shard: _open_shard(folder, shard) for shard in sorted(set(shard_of.values()))}
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            elsewhere = [other for other, tensors in shards.items() if name in tensors]
            where = f"it is in {', '.join(elsewhere)}" if elsewhere else "no shard has it"
            raise CheckpointError(f"{INDEX_FILE} says that {shard} has this tensor, but {where}", file=str(folder / shard), field=name)
    for shard, tensors in shards.items():
        for name in tensors:
            if shard_of.get(name) != shard:
                raise CheckpointError(f"{shard} has this tensor, but {INDEX_FILE} does not list it there", file=str(index), field=name)
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _open_shard(folder: Path, shard: str) -> dict[str, LazyTensor]:
    if not (folder / shard).exists():
        raise CheckpointError(f"the file is missing, {INDEX_FILE} names it", file=str(folder / shard))
    return open_safetensors(folder / shard)


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header's entries, where the data starts, and how many bytes of data there are."""
    if path.is_dir():
        raise CheckpointError("is a folder, not a safetensors file", file=str(path))
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < LENGTH_BYTES:
                raise CheckpointError(f"truncated: {size} bytes, a header takes at least {LENGTH_BYTES}", file=str(path), field="header")
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise CheckpointError(
                    f"the header's length is {length}, the file has {size} bytes and {MAX_HEADER_BYTES} are allowed: truncated, "
                    "or not a safetensors file",
                    file=str(path),
                    field="header",
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from error
    return parse_json_object(text, file=str(path), field="header"), LENGTH_BYTES + length, size - LENGTH_BYTES - length


def _span(path: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of a header's entry, checked against each other."""

    def fail(message: str) -> CheckpointError:
        return CheckpointError(message, file=str(path), field=name[:200])

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fail("a header's entry must have dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise fail(f"dtype {str(kind)[:60]!r} is not supported; supported: {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMS or 0 in shape:
        raise fail(f"shape {str(shape)[:60]} must be a list of at most {MAX_DIMS} positive integers")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise fail(f"data_offsets {str(offsets)[:60]} must be two integers")
    begin, end = offsets
    if end - begin != prod(shape) * DTYPES[kind].itemsize:
        raise fail(f"data_offsets {begin}..{end} do not fit {kind} of shape {tuple(shape)}: {prod(shape) * DTYPES[kind].itemsize} bytes")
    return DTYPES[kind], tuple(shape), begin, end


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(path: Path, spans: list[tuple[str, int, int]], data_bytes: int) -> None:
    """The data must be covered without gap or overlap, so that a cut or a padded file is always seen."""
    for (before, _, end), (name, begin, _) in pairwise([("the header", 0, 0), *spans]):
        if begin != end:
            raise CheckpointError(f"its data starts at byte {begin}, but {before} ends at {end}", file=str(path), field=name[:200])
    if not spans:
        raise CheckpointError("the file holds no tensors", file=str(path), field="header")
    name, _, end = spans[-1]
    if end > data_bytes:
        raise CheckpointError(f"truncated: its data ends at byte {end}, the file has {data_bytes}", file=str(path), field=name[:200])
    if end < data_bytes:
        raise CheckpointError(f"{data_bytes - end} bytes after the last tensor", file=str(path), field=name[:200])


def _read(path: Path, name: str, dtype: np.dtype, shape: tuple[int, ...], offset: int, num_bytes: int) -> np.ndarray:
    return read_stored_bytes(path, name, offset, num_bytes).view(dtype).reshape(shape)
