"""Orbax folders: Hugging Face's tensors as leaves of Orbax checkpoints, quantized ones as the arrays they are made of.

The folder has config.json, the tokenizer's files, one Orbax checkpoint per shard (`weights-00001`, …) and a manifest that says
where each tensor is and how it is stored. A shard is in memory as a whole while it is written; reading goes array by array,
through TensorStore, on which Orbax stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.checkpoints.config_bounds import check_sizes
from jaxinfer.checkpoints.hf_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, load_tokenizer
from jaxinfer.checkpoints.json_file import read_json_file
from jaxinfer.checkpoints.manifest import MANIFEST_FILE, read_manifest
from jaxinfer.checkpoints.packed_json import DescriptionError, describe, described_parts, parts_of, rebuild, shape_and_dtype
from jaxinfer.checkpoints.safetensors import written_dtype
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor, PackedTensor
from jaxinfer.errors import CheckpointError

if TYPE_CHECKING:
    from jaxinfer.quant.weight import QuantizedWeight

SHARD_NAME = re.compile(r"weights-\d{5}")
STORE_ERRORS = (ValueError, TypeError, KeyError, OSError, OverflowError, NotImplementedError, RuntimeError)
"""What TensorStore raises for files that are missing or damaged."""

Leaf = tuple[str, str, tuple[int, ...], np.dtype]
"""Shard, path within it, shape, dtype."""


def write_orbax(
    folder: Path, tensors: Mapping[str, LazyTensor], dtype: np.dtype, max_shard_bytes: int, show: Callable[[int], None]
) -> dict[str, Any]:
    """Write the shards; gives the manifest's `tensors`. Those with `packed` are written so, floats of the others as `dtype`."""
    import orbax.checkpoint as ocp  # late: it needs jax, and seconds

    entries: dict[str, Any] = {}
    done = 0
    for number, names in enumerate(_shards(tensors, dtype, max_shard_bytes), start=1):
        shard = f"weights-{number:05d}"
        tree: dict[str, Any] = {}
        for name in names:
            tree[name], entry = _read_tree(tensors[name], dtype)
            entries[name] = {"shard": shard, **entry}
        # Uncompressed: weights hardly shrink, and a file's size says how much there is to read.
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
            checkpointer.save((folder / shard).absolute(), ocp.args.PyTreeSave(tree))
        done += sum(_num_bytes(tensors[name], dtype) for name in names)
        show(done)
    return entries


def _read_tree(tensor: LazyTensor, dtype: np.dtype) -> tuple[Any, dict[str, Any]]:
    """The arrays of a tensor, and what the manifest says of it."""
    if tensor.packed is not None:
        packed = tensor.packed.read()
        return parts_of(packed), {"shape": list(tensor.shape), "dtype": tensor.dtype, "packed": describe(packed)}
    kind = written_dtype(tensor, dtype)
    return np.ascontiguousarray(tensor.read().astype(kind, copy=False)), {"shape": list(tensor.shape), "dtype": kind.name}


def _shards(tensors: Mapping[str, LazyTensor], dtype: np.dtype, max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        size = _num_bytes(tensor, dtype)
        if names and num_bytes + size > max_shard_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += size
    yield names


def _num_bytes(tensor: LazyTensor, dtype: np.dtype) -> int:
    if tensor.packed is not None:
        return sum(prod(part.shape) * part.dtype.itemsize for part in parts_of(tensor.packed.abstract).values())
    return prod(tensor.shape) * written_dtype(tensor, dtype).itemsize


def total_bytes(tensors: Mapping[str, LazyTensor], dtype: np.dtype) -> int:
    """How many bytes of arrays will be written."""
    return sum(_num_bytes(tensor, dtype) for tensor in tensors.values())


def open_orbax_folder(folder: Path) -> Checkpoint:
    """Open a folder that `jaxinfer convert --format orbax` wrote; every array's place is checked, none is read.

    Raises:
        CheckpointError: a file is missing or damaged, or the manifest does not fit.
    """
    config = read_json_file(folder / CONFIG_FILE)
    generation = folder / GENERATION_CONFIG_FILE
    manifest = read_manifest(folder)
    tensors = _open_tensors(folder, manifest["tensors"])
    check_sizes(config, tensors, str(folder / CONFIG_FILE))
    return Checkpoint(
        name=folder.resolve().name,
        path=folder,
        config=config,
        tensors=tensors,
        generation_config=read_json_file(generation) if generation.exists() else {},
        tokenizer_source=partial(load_tokenizer, folder),
    )


def _open_tensors(folder: Path, entries: Mapping[str, Any]) -> dict[str, LazyTensor]:
    manifest = str(folder / MANIFEST_FILE)
    leaves: dict[str, list[Leaf]] = {}
    tensors: dict[str, LazyTensor] = {}
    for name, entry in entries.items():
        try:
            leaves[name] = list(_leaves(name, entry))
            tensors[name] = _lazy(folder, name, entry)
        except DescriptionError as error:
            raise CheckpointError(str(error), file=manifest, field=name[:200]) from error
    if not tensors:
        raise CheckpointError("the folder holds no tensors", file=manifest, field="tensors")
    _check_sizes(folder, leaves)
    _check_arrays(folder, leaves)
    checked: set[Any] = set()
    for name, tensor in tensors.items():
        try:
            if tensor.packed is not None and (row := _row(tensor.packed.abstract, tensor.shape)) not in checked:
                _check_packed(tensor.packed.abstract, tensor.shape)
                checked.add(row)
        except (ValueError, TypeError, IndexError, AssertionError, ArithmeticError, AttributeError) as error:
            raise CheckpointError(f"its parts do not fit each other: {str(error)[:200]}", file=manifest, field=name[:200]) from error
    return tensors


def _leaves(name: str, entry: Any) -> Iterator[Leaf]:
    shard = entry.get("shard") if isinstance(entry, dict) else None
    if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard):
        raise DescriptionError(f"shard {str(shard)[:60]!r} is not the name of a shard")
    shape, dtype = shape_and_dtype(entry, name)
    if "packed" not in entry:
        yield shard, name, shape, dtype
        return
    for part, (part_shape, part_dtype) in described_parts(entry["packed"]).items():
        if part_shape[: len(shape) - 1] != shape[:-1]:
            raise DescriptionError(f"{part} of shape {list(part_shape)} is no part of a tensor of shape {list(shape)}")
        yield shard, f"{name}.{part}", part_shape, part_dtype


def _lazy(folder: Path, name: str, entry: Mapping[str, Any]) -> LazyTensor:
    import jax  # late: only quantized tensors and reading need it

    shard = folder / entry["shard"]
    shape, dtype = shape_and_dtype(entry, name)
    if "packed" not in entry:
        return LazyTensor(shape, dtype.name, partial(_read_array, shard, name, shape, dtype))
    described, parts = entry["packed"], described_parts(entry["packed"])

    def read() -> QuantizedWeight:
        return rebuild(described, {part: _read_array(shard, f"{name}.{part}", *of) for part, of in parts.items()})

    abstract = rebuild(described, {part: jax.ShapeDtypeStruct(*of) for part, of in parts.items()})
    return LazyTensor(shape, dtype.name, lambda: read().dequantize(), PackedTensor(abstract, read))


def _check_sizes(folder: Path, leaves: Mapping[str, list[Leaf]]) -> None:
    """Arrays are stored uncompressed: more bytes than the shard has cannot be in it."""
    needed: dict[str, int] = {}
    for name, parts in leaves.items():
        for shard, _, shape, dtype in parts:
            needed[shard] = needed.get(shard, 0) + prod(shape) * dtype.itemsize
            path = folder / shard
            if not path.is_dir():
                raise CheckpointError(f"the folder is missing, {MANIFEST_FILE} names it for {name[:200]}", file=str(path))
    for shard, num_bytes in needed.items():
        stored = sum(path.stat().st_size for path in (folder / shard).rglob("*") if path.is_file())
        if num_bytes > stored:
            raise CheckpointError(
                f"truncated: {MANIFEST_FILE} names {num_bytes} bytes of arrays, the shard has {stored}", file=str(folder / shard)
            )


def _check_arrays(folder: Path, leaves: Mapping[str, list[Leaf]]) -> None:
    """Every array is there, of the shape and dtype that the manifest says, and no other is."""
    expected: dict[str, dict[str, str]] = {}
    for name, parts in leaves.items():
        for shard, path, shape, dtype in parts:
            _open_array(folder / shard, path, shape, dtype)
            expected.setdefault(shard, {})[path] = name
    for shard, paths in expected.items():
        unknown = sorted(_stored_paths(folder / shard) - set(paths))
        if unknown:
            raise CheckpointError(
                f"the shard has this array, but {MANIFEST_FILE} does not list it", file=str(folder / shard), field=unknown[0][:200]
            )


def _stored_paths(shard: Path) -> set[str]:
    import tensorstore as ts

    try:
        keys = ts.KvStore.open(_store(shard)).result().list().result()
        return {key.decode().rpartition("/")[0] for key in keys}
    except STORE_ERRORS as error:
        raise CheckpointError(f"cannot be read: {str(error)[:200]}", file=str(shard)) from error


def _store(shard: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": f"file://{shard.absolute()}/"}


def _open_array(shard: Path, path: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    import tensorstore as ts

    # A chunk that is missing must not become zeros.
    spec = {"driver": "zarr", "kvstore": {**_store(shard), "path": path + "/"}, "fill_missing_data_reads": False}
    try:
        array = ts.open(spec, open=True, read=True).result()
        stored = array.spec().to_json()["metadata"]
    except STORE_ERRORS as error:
        raise CheckpointError(f"cannot be read: {str(error)[:200]}", file=str(shard), field=path[:200]) from error
    got = (tuple(array.shape), array.dtype.numpy_dtype)
    if got != (shape, dtype):
        raise CheckpointError(
            f"is {got[1]} of shape {list(got[0])}, {MANIFEST_FILE} says {dtype} of shape {list(shape)}", file=str(shard), field=path[:200]
        )
    is_cut = any(chunk > size for chunk, size in zip(stored["chunks"], shape, strict=True))
    if stored.get("compressor") is not None or stored.get("filters") or is_cut:
        raise CheckpointError("is compressed or cut into chunks that are not ours", file=str(shard), field=path[:200])
    return array


def _read_array(shard: Path, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = _open_array(shard, path, shape, dtype)
    try:
        return array.read().result()
    except STORE_ERRORS as error:
        raise CheckpointError(f"cannot be read: {str(error)[:200]}", file=str(shard), field=path[:200]) from error


def _row(abstract: Any, shape: tuple[int, ...]) -> Any:
    """All that a row of the weight is made of; tensors that agree in it are checked once."""
    import jax

    parts = tuple((leaf.shape[len(shape) - 1 :], leaf.dtype) for leaf in jax.tree.leaves(abstract))
    return jax.tree.structure(abstract), parts, shape[-1]


def _check_packed(abstract: Any, shape: tuple[int, ...]) -> None:
    """One row of the weight must be of the tensor's length and multiply: then its parts fit each other.

    Raises:
        ValueError, TypeError and what else a product of shapes that do not fit ends in.
    """
    import jax

    from jaxinfer.quant.packed import PackedWeight
    from pallas_kernels.packed_matmul import packed_matmul

    if not isinstance(abstract, PackedWeight):
        expected = type(abstract).abstract(shape)
        if jax.tree.map(lambda leaf: leaf.shape, abstract) != jax.tree.map(lambda leaf: leaf.shape, expected):
            raise ValueError(f"parts of shape {[leaf.shape for leaf in jax.tree.leaves(abstract)]}")
        return
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[len(shape) - 1 :]), leaf.dtype), abstract.matrix)
    jax.eval_shape(partial(packed_matmul, implementation="reference"), jax.ShapeDtypeStruct((1, shape[-1]), np.float32), row)
