"""AWQ: 4 bits in groups along the inputs, as AutoAWQ's `gemm` version writes them.

qweight int32 [K, N / 8] holds 8 outputs a word and qzeros int32 [C, N / 8] their zero points: nibble i belongs to output
ORDER[i] of the eight; scales [C, N].
"""

from __future__ import annotations

import numpy as np

from jaxinfer.checkpoints.prequantized.scheme import FLOATS, Scheme, Settings, Stored, packed_tensor
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.quant import integers
from jaxinfer.quant.packed import PackedWeight

BITS = 4
PER_WORD = 32 // BITS
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def make_scheme(settings: Settings) -> Scheme:
    """The scheme of a `quantization_config`."""
    settings.require("bits", (BITS,))
    settings.require("zero_point", (True,), default=True)
    key = "version" if "version" in settings.values else "format"
    settings.require(key, ("gemm", "GEMM"), default="gemm")
    group_size = settings.group_size()
    return Scheme(".qweight", (".qzeros", ".scales"), lambda stored: _build(stored, group_size))


def _build(stored: Stored, group_size: int) -> LazyTensor:
    num_inputs, words = stored.need(".qweight", ("int32",)).shape
    num_outputs = words * PER_WORD
    num_groups = stored.num_groups(".qweight", num_inputs, group_size)
    scales = stored.need(".scales", FLOATS)
    stored.check_shape(".scales", (num_groups, num_outputs))
    stored.need(".qzeros", ("int32",))
    stored.check_shape(".qzeros", (num_groups, words))

    def read() -> PackedWeight:
        codes, zeros = _in_order(stored.read(".qweight")), _in_order(stored.read(".qzeros"))
        return integers.pack(codes, np.ascontiguousarray(stored.read(".scales").T), bits=BITS, zeros=zeros)

    shape = (num_outputs, num_inputs)
    return packed_tensor(shape, integers.abstract(shape, num_groups, scales.dtype, bits=BITS, has_zeros=True), read)


def _in_order(words: np.ndarray) -> np.ndarray:
    """Words [R, N / 8] -> uint8 [N, R]."""
    nibbles = integers.unpack_words(words, BITS).reshape(*words.shape, PER_WORD)
    return np.ascontiguousarray(nibbles[..., np.argsort(ORDER)].reshape(words.shape[0], -1).T)
