"""compressed-tensors, as llm-compressor writes it: packed integers, int8 and float8 matrices.

pack-quantized: weight_packed int32 [N, K * bits / 32], codes shifted to be unsigned, the first in the lowest bits; weight_scale
[N, C]; weight_zero_point int32 [N * bits / 32, C] packed along the outputs, or plain int8 [N, C] in older files.
int-quantized: weight int8 [N, K], weight_scale [N, C]. float-quantized: as `fp8`, scales called weight_scale.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from jaxinfer.checkpoints.prequantized.fp8 import float8_scheme
from jaxinfer.checkpoints.prequantized.scheme import ACTIVATION_SCALES, FLOATS, Scheme, Settings, Stored, packed_tensor
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.quant import integers
from jaxinfer.quant.int8 import Int8Weight
from jaxinfer.quant.packed import PackedWeight

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def make_scheme(settings: Settings) -> Scheme:
    """The scheme of a `quantization_config`."""
    # Files of both are compressed; "frozen" only says that calibration was over.
    settings.require("quantization_status", ("compressed", "frozen"), default="compressed")
    settings.require_empty("kv_cache_scheme", "transform_config")
    if settings.values.get("sparsity_config"):
        settings.inner("sparsity_config").require("format", ("dense",), default="dense")
    stored_as = settings.require("format", FORMATS)
    group = _only_group(settings)
    weights = group.inner("weights")
    group.require_empty("output_activations")
    has_int8_activations, unread = _activations(group)
    weights.require("dynamic", (False,), default=False)
    weights.require("actorder", (None, False, "weight", "static"))
    kind = weights.require("type", ("int", "float"), default="int")
    if stored_as == "float-quantized" or kind == "float":
        return _float_scheme(weights, unread)
    is_symmetric = weights.require("symmetric", (True, False), default=True)
    if stored_as == "pack-quantized":
        bits, group_size = weights.require("num_bits", (4, 8)), _group_size(weights, ("group", "channel"))
        build = partial(_build_packed, bits=bits, group_size=group_size, is_symmetric=is_symmetric)
        return Scheme(".weight_packed", (".weight_scale", ".weight_zero_point", ".weight_shape", *unread), build)
    weights.require("num_bits", (8,))
    group_size = _group_size(weights, ("tensor", "channel", "group"))
    build = partial(_build_int8, group_size=group_size, is_symmetric=is_symmetric, has_int8_activations=has_int8_activations)
    others = (".weight_scale", ".weight_zero_point", *unread)
    return Scheme(".weight", others, build, is_quantized=lambda tensor: tensor.dtype == "int8")


def _only_group(settings: Settings) -> Settings:
    """The way that all quantized matrices are stored."""
    groups = settings.inner("config_groups")
    schemes = [
        {key: value for key, value in group.items() if key != "targets"} for group in groups.values.values() if isinstance(group, dict)
    ]
    if not schemes or len(schemes) != len(groups.values) or any(scheme != schemes[0] for scheme in schemes):
        raise settings.refuse("config_groups", "must have groups that differ in their targets only")
    return groups.inner(next(iter(groups.values)))


def _activations(group: Settings) -> tuple[bool, tuple[str, ...]]:
    """Whether activations are rounded to int8 per token, and which tensors about them are left unread.

    Other roundings, such as those with stored scales, are not done: values stay closer to the floats, as they do in vLLM on
    devices that cannot multiply in 8 bits.
    """
    if group.values.get("input_activations") is None:
        return False, ()
    activations = group.inner("input_activations")
    if not activations.require("dynamic", (True, False), default=False):
        return False, ACTIVATION_SCALES
    values = activations.values
    return values.get("type", "int") == "int" and values.get("num_bits") == 8 and values.get("strategy") == "token", ()


def _group_size(weights: Settings, strategies: tuple[str, ...]) -> int:
    return weights.size("group_size") if weights.require("strategy", strategies) == "group" else 0


def _float_scheme(weights: Settings, unread: tuple[str, ...]) -> Scheme:
    weights.require("num_bits", (8,))
    weights.require("type", ("float",))
    weights.require("symmetric", (True,), default=True)
    if weights.require("strategy", ("tensor", "channel", "block")) != "block":
        return float8_scheme(None, (".weight_scale",), unread)
    block = weights.values.get("block_structure")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise weights.refuse("block_structure", f"must be two positive integers, got {str(block)[:80]!r}")
    return float8_scheme((block[0], block[1]), (".weight_scale",), unread)


def _build_packed(stored: Stored, *, bits: int, group_size: int, is_symmetric: bool) -> LazyTensor:
    per_word, half = 32 // bits, 1 << (bits - 1)
    num_outputs, words = stored.need(".weight_packed", ("int32",)).shape
    scales = stored.need(".weight_scale", FLOATS)
    stored.need(".weight_shape", ("int64", "int32"), 1)
    stored.check_shape(".weight_shape", (2,))
    # The last word may be filled up; with groups their number tells, else the shape that is read.
    num_inputs = scales.shape[1] * group_size if group_size else _stored_shape(stored, words * per_word)
    if -(-num_inputs // per_word) != words:
        raise stored.fault(".weight_packed", f"{words} words do not hold {num_inputs} inputs of {bits} bits")
    num_groups = stored.num_groups(".weight_packed", num_inputs, group_size)
    stored.check_shape(".weight_scale", (num_outputs, num_groups))
    if not is_symmetric:
        stored.need(".weight_zero_point", ("int32", "int8"))
        is_packed = stored.parts[".weight_zero_point"].dtype == "int32"
        stored.check_shape(".weight_zero_point", (-(-num_outputs // per_word) if is_packed else num_outputs, num_groups))

    def read() -> PackedWeight:
        if stored.read(".weight_shape").tolist() != [num_outputs, num_inputs]:
            raise stored.fault(".weight_shape", f"it does not say {[num_outputs, num_inputs]}, which the other tensors are")
        codes = np.ascontiguousarray(integers.unpack_words(stored.read(".weight_packed"), bits)[:, :num_inputs])
        scale_values = np.ascontiguousarray(stored.read(".weight_scale"))
        if is_symmetric:
            return integers.pack(codes, scale_values, bits=bits, zero=half)
        return integers.pack(codes, scale_values, bits=bits, zeros=_zero_points(stored, bits, num_outputs))

    shape = (num_outputs, num_inputs)
    zero = half if is_symmetric else 0
    return packed_tensor(shape, integers.abstract(shape, num_groups, scales.dtype, bits=bits, zero=zero, has_zeros=not is_symmetric), read)


def _stored_shape(stored: Stored, padded: int) -> int:
    num_inputs = int(stored.read(".weight_shape")[1])
    if not 0 < num_inputs <= padded:
        raise stored.fault(".weight_shape", f"{num_inputs} inputs where weight_packed has room for {padded}")
    return num_inputs


def _zero_points(stored: Stored, bits: int, num_outputs: int) -> np.ndarray:
    """uint8 [N C], shifted as the codes are."""
    values = stored.read(".weight_zero_point")
    if values.dtype == np.int8:
        return (values.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    return np.ascontiguousarray(integers.unpack_words(values.T, bits)[:, :num_outputs].T)


def _build_int8(stored: Stored, *, group_size: int, is_symmetric: bool, has_int8_activations: bool) -> LazyTensor:
    shape = stored.need(".weight", ("int8",)).shape
    num_outputs, num_inputs = shape
    num_groups = stored.num_groups(".weight", num_inputs, group_size)
    scales = stored.need(".weight_scale", FLOATS, (0, 1, 2))
    allowed = ((num_outputs, num_groups),) if group_size else ((num_outputs, 1), (num_outputs,), (1, 1), (1,), ())
    stored.check_shape(".weight_scale", *allowed)
    if not is_symmetric:
        stored.need(".weight_zero_point", ("int8",), (0, 1, 2))
        stored.check_shape(".weight_zero_point", *allowed)

    def per_group(suffix: str) -> np.ndarray:
        values = stored.read(suffix)
        return np.ascontiguousarray(np.broadcast_to(values.reshape(-1, num_groups), (num_outputs, num_groups)))

    if has_int8_activations and is_symmetric and not group_size:

        def read_int8() -> Int8Weight:
            return Int8Weight(stored.read(".weight"), per_group(".weight_scale")[:, 0].astype(np.float32))

        return packed_tensor(shape, Int8Weight.abstract(shape), read_int8)

    def read() -> PackedWeight:
        codes = stored.read(".weight").view(np.uint8) ^ np.uint8(128)
        if is_symmetric:
            return integers.pack(codes, per_group(".weight_scale"), bits=8, zero=128)
        zeros = per_group(".weight_zero_point").view(np.uint8) ^ np.uint8(128)
        return integers.pack(codes, per_group(".weight_scale"), bits=8, zeros=zeros)

    zero = 128 if is_symmetric else 0
    return packed_tensor(shape, integers.abstract(shape, num_groups, scales.dtype, bits=8, zero=zero, has_zeros=not is_symmetric), read)
