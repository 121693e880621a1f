"""Tensors of a checkpoint -> parameters of a model, one tensor at a time, straight onto the mesh.

`declare_parameters` decides how every parameter is stored and checks that the checkpoint can fill it, before anything is
read or compiled; `load_parameters` fills it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxinfer import sharding
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.layers.weights import Source, WeightSpec
from jaxinfer.quant.parts import Parts
from jaxinfer.quant.weight import Method, QuantizedWeight

UNUSED_BY_ALL = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$")
"""What older files carry and no model reads: rope tables, GPT-2's causal mask, the output matrix of a tied model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How matrices are to be stored on the device."""

    method: Method | None = None
    """Quantize every matrix that can be; None leaves floats floats."""
    keeps_packed: bool = False
    """Without a method: a matrix that is stored quantized is multiplied as it is stored."""
    vocabulary: Storage | None = None
    """How the vocabulary's matrices, embedding and output, are stored; None: as the others."""

    def of(self, spec: WeightSpec) -> Storage:
        """What applies to a parameter."""
        return self if self.vocabulary is None or "vocab" not in spec.axes else self.vocabulary


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where a parameter goes, an attribute of a module, and what it is made of."""

    module: nnx.Module
    name: str
    spec: WeightSpec
    dtype: np.dtype
    form: Form
    partition: Any
    """Its partition spec, or the pytree of them."""


Form = Callable[[WeightSpec, Mapping[str, LazyTensor], int], Any]
"""Reads the sources of a spec and gives the value as numpy arrays; the last argument is the number of shards."""


def declare_parameters(
    model: nnx.Module,
    mesh: Mesh,
    checkpoint: Checkpoint,
    storage: Storage,
    unused: tuple[str, ...] = (),
    place: Callable[[Mesh, Any, Any], Any] = sharding.put,
) -> list[WeightSlot]:
    """Give every parameter the shapes, dtypes and shardings that it will have, so that programs can be compiled.

    Returns what `load_parameters` fills. Tensors whose names begin with one of `unused` may be there. Nothing is read but biases
    that the model does not have, which must be zeros. `place` puts the model's constants, such as tables of rotations, onto the
    mesh; `sharding.struct` only says where they will lie, for a mesh of devices that are not there.

    Raises:
        CheckpointError: naming the tensor that is missing or of another shape.
        UnsupportedModelError: naming a tensor that the model does not use.
    """
    slots, used = [], set()
    num_shards = mesh.shape[sharding.TENSOR]
    for module, name, param in list(parameters(model)):
        spec: WeightSpec = param.get_metadata()["spec"]
        struct = param.get_value()
        _check_sources(spec, checkpoint)
        used |= {source.name for source in spec.parts}
        value, form = _choose_form(spec, struct, checkpoint.tensors, storage, num_shards)
        partition = sharding.spec(*spec.axes)
        partitions = value.specs(partition) if isinstance(value, QuantizedWeight) else partition
        # A fresh Param without the spec: layers of one structure must compare equal, for they are traced once.
        setattr(module, name, nnx.Param(sharding.struct(mesh, value, partitions)))
        slots.append(WeightSlot(module, name, spec, struct.dtype, form, partitions))
    left = set(checkpoint.tensors) - used
    unknown = sorted(name for name in left if not UNUSED_BY_ALL.search(name) and not name.startswith(unused))
    unknown = [name for name in unknown if not _is_zero_bias(name, checkpoint.tensors, used)]
    if unknown:
        raise UnsupportedModelError(
            f"{checkpoint.path}: tensor {unknown[0]!r:.200} is not used by this model ({len(unknown)} are not): config.json does not ask for it"
        )
    for module, name, variable in list(_variables(model)):
        if isinstance(variable.get_value(), np.ndarray):
            setattr(module, name, nnx.Variable(place(mesh, variable.get_value(), sharding.spec())))
    return slots


def _is_zero_bias(name: str, tensors: Mapping[str, LazyTensor], used: set[str]) -> bool:
    """Whether a tensor is a bias that adds nothing: GPTQ's tools gave one to every matrix, also in models without."""
    matrix = name.removesuffix("bias") + "weight"
    if not name.endswith(".bias") or matrix not in used or tensors[name].shape != tensors[matrix].shape[:1]:
        return False
    return not np.asarray(tensors[name].read()).any()


def load_parameters(
    slots: list[WeightSlot], checkpoint: Checkpoint, mesh: Mesh, on_tensor: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Read every parameter, one at a time, and put it on the mesh; `on_tensor(done, total)` after each.

    Raises:
        CheckpointError: the file changed or cannot be read.
    """
    for done, slot in enumerate(slots):
        value = slot.form(slot.spec, checkpoint.tensors, mesh.shape[sharding.TENSOR])
        if isinstance(value, np.ndarray):
            value = value.astype(slot.dtype, copy=False)
        setattr(slot.module, slot.name, nnx.Param(sharding.put(mesh, value, slot.partition)))
        on_tensor(done + 1, len(slots))


# ---- how a parameter is stored --------------------------------------------------------------------------------------


def _choose_form(
    spec: WeightSpec, struct: jax.ShapeDtypeStruct, tensors: Mapping[str, LazyTensor], storage: Storage, num_shards: int
) -> tuple[Any, Form]:
    """The parameter's abstract value, and how it is read."""
    storage = storage.of(spec)
    if spec.is_quantizable and storage.method is not None:
        shards_of_rows = num_shards if spec.axes[-1] is not None else 1
        if storage.method.accepts(spec.shape, shards_of_rows):
            return storage.method.abstract(spec.shape), _Quantized(storage.method)
    if spec.is_quantizable and storage.method is None and storage.keeps_packed:
        packed = _abstract_packed(spec, tensors)
        if packed is not None and _can_be_split(packed, sharding.spec(*spec.axes), num_shards):
            return packed, _read_packed
    return struct, _read_floats


@dataclass(frozen=True, slots=True)
class _Quantized:
    """Quantize one matrix at a time: of a stack of experts the floats of one are in memory."""

    method: Method

    def __call__(self, spec: WeightSpec, tensors: Mapping[str, LazyTensor], num_shards: int) -> QuantizedWeight:
        matrices = [self.method.from_float(np.asarray(matrix, np.float32)) for matrix in _matrices(spec, tensors, num_shards)]
        return _stacked(spec, matrices)


def _read_floats(spec: WeightSpec, tensors: Mapping[str, LazyTensor], num_shards: int) -> np.ndarray:
    return _stacked(spec, list(_matrices(spec, tensors, num_shards)))


def _stacked(spec: WeightSpec, matrices: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *matrices) if spec.num_stacked else matrices[0]


def _matrices(spec: WeightSpec, tensors: Mapping[str, LazyTensor], num_shards: int) -> Iterator[np.ndarray]:
    """Each run's sources as one array, floats."""
    last: tuple[str, np.ndarray] | None = None  # a tensor that stacks experts is read once for all of them
    for run in _runs(spec):
        pieces = []
        for source in run:
            if last is None or last[0] != source.name:
                last = (source.name, np.asarray(tensors[source.name].read()))
            pieces.append(_cut(last[1], source))
        yield _fuse(pieces, num_shards)


def _read_packed(spec: WeightSpec, tensors: Mapping[str, LazyTensor], num_shards: int) -> Any:
    last: tuple[str, Any] | None = None
    matrices = []
    for run in _runs(spec):
        pieces = []
        for source in run:
            if last is None or last[0] != source.name:
                tensor = tensors[source.name]
                last = (source.name, tensor.packed.read() if tensor.packed is not None else np.asarray(tensor.read()))
            pieces.append(_cut(last[1], source))
        is_one_type = len({jax.tree.structure(piece) for piece in pieces}) == 1
        matrices.append(_fuse(pieces, num_shards) if is_one_type else Parts(tuple(pieces)))
    return _stacked(spec, matrices)


def _abstract_packed(spec: WeightSpec, tensors: Mapping[str, LazyTensor]) -> Any | None:
    """What `_read_packed` will give, as ShapeDtypeStructs; None when no source is stored quantized, or experts differ."""
    matrices = []
    for run in _runs(spec):
        pieces = [_abstract_piece(tensors[source.name], source) for source in run]
        if not any(isinstance(piece, QuantizedWeight) for piece in pieces):
            return None
        if len({jax.tree.structure(piece) for piece in pieces}) > 1:
            matrices.append(Parts(tuple(pieces)))
        else:
            matrices.append(jax.tree.map(lambda *leaves: _sized(leaves[0], sum(leaf.shape[0] for leaf in leaves)), *pieces))
    if not spec.num_stacked:
        return matrices[0]
    if len({(jax.tree.structure(matrix), *(leaf.shape for leaf in jax.tree.leaves(matrix))) for matrix in matrices}) > 1:
        return None
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((spec.num_stacked, *leaf.shape), leaf.dtype), matrices[0])


def _sized(leaf: jax.ShapeDtypeStruct, num_rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype)


def _abstract_piece(tensor: LazyTensor, source: Source) -> Any:
    if tensor.packed is None:
        return jax.ShapeDtypeStruct(_cut_shape(tensor.shape, source), np.dtype(tensor.dtype))
    piece = tensor.packed.abstract
    if source.expert is not None:
        piece = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), piece)
    return jax.tree.map(lambda leaf: _sized(leaf, _num_rows(leaf.shape[0], source)), piece)


def _can_be_split(value: Any, partition: PartitionSpec, num_shards: int) -> bool:
    """Whether every array's split axes leave whole pieces: a group of weights is never cut."""
    specs = jax.tree.leaves(value.specs(partition), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    return all(
        leaf.shape[axis] % num_shards == 0
        for leaf, spec in zip(jax.tree.leaves(value), specs, strict=True)
        for axis, name in enumerate(spec)
        if name is not None
    )


# ---- sources -----------------------------------------------------------------------------------------------------------


def _runs(spec: WeightSpec) -> list[list[Source]]:
    """The sources of each matrix of a stack; of a spec that is none, all of them."""
    sources = spec.parts
    length = len(sources) // (spec.num_stacked or 1)
    return [sources[start : start + length] for start in range(0, len(sources), length)]


def _cut(value: Any, source: Source) -> Any:
    """The part of a tensor that a source names. What is stored quantized stands for [out, in] already."""
    if source.expert is not None:
        value = jax.tree.map(lambda leaf: leaf[source.expert], value)
    if source.is_transposed and isinstance(value, np.ndarray):
        value = value.T
    if source.rows is not None:
        value = jax.tree.map(lambda leaf: leaf[slice(*source.rows)], value)
    if source.copies is not None:
        rows, times = source.copies
        value = jax.tree.map(lambda leaf: leaf.reshape(-1, rows, *leaf.shape[1:]).repeat(times, axis=0).reshape(-1, *leaf.shape[1:]), value)
    return value


def _cut_shape(shape: tuple[int, ...], source: Source) -> tuple[int, ...]:
    if source.expert is not None:
        shape = shape[1:]
    if source.is_transposed:
        shape = shape[::-1]
    return (_num_rows(shape[0], source), *shape[1:])


def _num_rows(num_rows: int, source: Source) -> int:
    """What is left of so many rows, or becomes of them."""
    num_rows = num_rows if source.rows is None else len(range(*source.rows))
    return num_rows if source.copies is None else num_rows * source.copies[1]


def _fuse(pieces: list[Any], num_shards: int) -> Any:
    """One value of several, shard-major: every device's piece of each source, one device after the other."""
    if len(pieces) == 1:
        return pieces[0]

    def fuse(*leaves: np.ndarray) -> np.ndarray:
        split = [np.split(leaf, num_shards) for leaf in leaves]
        return np.concatenate([piece[shard] for shard in range(num_shards) for piece in split])

    return jax.tree.map(fuse, *pieces)


def _check_sources(spec: WeightSpec, checkpoint: Checkpoint) -> None:
    file = str(checkpoint.path)
    wanted = spec.shape[1:] if spec.num_stacked else spec.shape
    for run in _runs(spec):
        total = 0
        for source in run:
            tensor = checkpoint.tensors.get(source.name)
            if tensor is None:
                hint = "; config.json says tie_word_embeddings is false" if source.name == "lm_head.weight" else ""
                raise CheckpointError(f"this tensor is missing{hint}", file=file, field=source.name)
            _check_bounds(tensor.shape, source, len(wanted), file)
            shape = _cut_shape(tensor.shape, source)
            if shape[1:] != wanted[1:]:
                raise CheckpointError(
                    f"its shape is {list(tensor.shape)} where config.json asks for {list(wanted)}", file=file, field=source.name
                )
            total += shape[0]
        if total != wanted[0]:
            names = " + ".join(dict.fromkeys(source.name for source in run))
            raise CheckpointError(f"{total} rows where config.json asks for {wanted[0]}", file=file, field=names)


def _check_bounds(shape: tuple[int, ...], source: Source, num_dims: int, file: str) -> None:
    """Refuse a tensor that has other dimensions than the source supposes, or too few experts or rows for it."""
    num_dims += source.expert is not None
    rows = shape[-1] if source.is_transposed else shape[source.expert is not None] if len(shape) == num_dims else 0
    if (
        len(shape) != num_dims
        or (source.expert is not None and source.expert >= shape[0])
        or (source.rows is not None and source.rows[1] > rows)
    ):
        raise CheckpointError(f"its shape is {list(shape)}, too small for config.json: {source}", file=file, field=source.name)


# ---- parameters of a model -----------------------------------------------------------------------------------------------


def _variables(model: nnx.Module) -> Iterator[tuple[nnx.Module, str, nnx.Variable]]:
    for _, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Variable):
                yield module, name, value


def parameters(model: nnx.Module) -> Iterator[tuple[nnx.Module, str, nnx.Param]]:
    """Every parameter, with the module and the attribute that hold it."""
    return ((module, name, value) for module, name, value in _variables(model) if isinstance(value, nnx.Param))
