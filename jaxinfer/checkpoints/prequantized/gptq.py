"""GPTQ: 4 or 8 bits in groups along the inputs, as AutoGPTQ and GPTQModel write them.

qweight int32 [K / p, N] holds p = 32 / bits consecutive inputs a word, the first in the lowest bits; qzeros int32 [C, N / p]
the zero points of p consecutive outputs, less one in the first version of the format; scales [C, N]. With desc_act g_idx int32
[K] says which group an input belongs to; unless that is in order the matrix is read as floats.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from jaxinfer.checkpoints.prequantized.scheme import FLOATS, Scheme, Settings, Stored, packed_tensor
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.quant import integers
from jaxinfer.quant.packed import PackedWeight


def make_scheme(settings: Settings) -> Scheme:
    """The scheme of a `quantization_config`."""
    bits = settings.require("bits", (4, 8))
    has_order = settings.require("desc_act", (False, True), default=False)
    settings.require_empty("dynamic")
    settings.require("pack_dtype", ("int32",), default="int32")
    group_size = settings.group_size()
    key = "checkpoint_format" if "checkpoint_format" in settings.values else "format"
    # The first version stores zero points less one.
    zero_shift = 1 if settings.require(key, ("gptq", "gptq_v2"), default="gptq") == "gptq" else 0
    build = partial(_build, bits=bits, group_size=group_size, zero_shift=zero_shift, has_order=has_order)
    return Scheme(".qweight", (".qzeros", ".scales", ".g_idx"), build)


def _build(stored: Stored, *, bits: int, group_size: int, zero_shift: int, has_order: bool) -> LazyTensor:
    per_word = 32 // bits
    words, num_outputs = stored.need(".qweight", ("int32",)).shape
    num_inputs = words * per_word
    num_groups = stored.num_groups(".qweight", num_inputs, group_size)
    scales = stored.need(".scales", FLOATS)
    stored.check_shape(".scales", (num_groups, num_outputs))
    stored.need(".qzeros", ("int32",))
    stored.check_shape(".qzeros", (num_groups, -(-num_outputs // per_word)))
    if has_order or ".g_idx" in stored.parts:
        stored.need(".g_idx", ("int32",), 1)
        stored.check_shape(".g_idx", (num_inputs,))

    def is_in_order() -> bool:
        return not (stored.read(".g_idx") != np.arange(num_inputs) // (group_size or num_inputs)).any()

    def stored_values() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes [N K], zero points and scales [N C]."""
        zeros = integers.unpack_words(stored.read(".qzeros"), bits)[:, :num_outputs]
        if zeros.max() + zero_shift > 255:
            raise stored.fault(".qzeros", "a zero point of 256 does not fit into 8 bits")
        codes = integers.unpack_words(stored.read(".qweight").T, bits)
        return codes, np.ascontiguousarray(zeros.T) + np.uint8(zero_shift), np.ascontiguousarray(stored.read(".scales").T)

    def read() -> PackedWeight:
        if ".g_idx" in stored.parts and not is_in_order():
            raise stored.fault(".g_idx", "inputs are not grouped in order, which desc_act false promises")
        codes, zeros, scales = stored_values()
        return integers.pack(codes, scales, bits=bits, zeros=zeros)

    def read_floats() -> np.ndarray:
        groups = stored.read(".g_idx")
        if groups.min() < 0 or groups.max() >= num_groups:
            raise stored.fault(".g_idx", f"groups must be from 0 to {num_groups - 1}, got {groups.min()} to {groups.max()}")
        codes, zeros, scales = stored_values()
        return (codes.astype(np.float32) - zeros[:, groups]) * scales.astype(np.float32)[:, groups]

    shape = (num_outputs, num_inputs)
    # Files with static groups are in order all the same. One small tensor is read here to see it.
    if has_order and not is_in_order():
        return LazyTensor(shape, "float32", read_floats)
    return packed_tensor(shape, integers.abstract(shape, num_groups, scales.dtype, bits=bits, has_zeros=True), read)
