"""GPTQ: 4 or 8 bits in groups along the inputs, as AutoGPTQ and GPTQModel write them.

qweight int32 [K / p, N] holds p = 32 / bits consecutive inputs a word, the first in the lowest bits; qzeros int32 [C, N / p]
the zero points of p consecutive outputs, less one in the first version of the format; scales [C, N].
"""

from __future__ import annotations

import numpy as np

from jaxinfer.checkpoints.prequantized.scheme import FLOATS, Scheme, Settings, Stored, packed_tensor
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.quant import integers
from jaxinfer.quant.packed import PackedWeight


def make_scheme(settings: Settings) -> Scheme:
    """The scheme of a `quantization_config`."""
    bits = settings.require("bits", (4, 8))
    settings.require("desc_act", (False,), default=False)
    settings.require_empty("dynamic")
    settings.require("pack_dtype", ("int32",), default="int32")
    group_size = settings.group_size()
    key = "checkpoint_format" if "checkpoint_format" in settings.values else "format"
    # The first version stores zero points less one.
    zero_shift = 1 if settings.require(key, ("gptq", "gptq_v2"), default="gptq") == "gptq" else 0
    return Scheme(".qweight", (".qzeros", ".scales", ".g_idx"), lambda stored: _build(stored, bits, group_size, zero_shift))


def _build(stored: Stored, bits: int, group_size: int, zero_shift: int) -> LazyTensor:
    per_word = 32 // bits
    words, num_outputs = stored.need(".qweight", ("int32",)).shape
    num_inputs = words * per_word
    num_groups = stored.num_groups(".qweight", num_inputs, group_size)
    scales = stored.need(".scales", FLOATS)
    stored.check_shape(".scales", (num_groups, num_outputs))
    stored.need(".qzeros", ("int32",))
    stored.check_shape(".qzeros", (num_groups, -(-num_outputs // per_word)))
    if ".g_idx" in stored.parts:
        stored.need(".g_idx", ("int32",), 1)
        stored.check_shape(".g_idx", (num_inputs,))

    def read() -> PackedWeight:
        if ".g_idx" in stored.parts and (stored.read(".g_idx") != np.arange(num_inputs) // (group_size or num_inputs)).any():
            raise stored.fault(".g_idx", "inputs are not grouped in order, which desc_act false promises")
        zeros = integers.unpack_words(stored.read(".qzeros"), bits)[:, :num_outputs]
        if zeros.max() + zero_shift > 255:
            raise stored.fault(".qzeros", "a zero point of 256 does not fit into 8 bits")
        codes = integers.unpack_words(stored.read(".qweight").T, bits)
        zeros = np.ascontiguousarray(zeros.T) + np.uint8(zero_shift)
        return integers.pack(codes, np.ascontiguousarray(stored.read(".scales").T), bits=bits, zeros=zeros)

    shape = (num_outputs, num_inputs)
    return packed_tensor(shape, integers.abstract(shape, num_groups, scales.dtype, bits=bits, has_zeros=True), read)
