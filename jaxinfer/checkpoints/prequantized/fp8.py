"""float8_e4m3fn weights with a scale per tensor, per output channel or per block, as DeepSeek-V3 and vLLM's `fp8` store them.

weight float8 [N, K] times weight_scale_inv [N / 128, K / 128], rounded up, or weight_scale of one value or a row's. The
activations that such checkpoints round to 8 bits, with scales of their own or with stored ones, stay floats here.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from jaxinfer.checkpoints.prequantized.scheme import ACTIVATION_SCALES, FLOATS, Scheme, Settings, Stored, packed_tensor
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.quant import fp8
from jaxinfer.quant.packed import PackedWeight

FLOAT8 = "float8_e4m3fn"
NOT_A_NUMBER = 0x7F


def make_scheme(settings: Settings) -> Scheme:
    """The scheme of a `quantization_config`."""
    is_static = settings.require("activation_scheme", ("dynamic", "static"), default="dynamic") == "static"
    settings.require("fmt", ("e4m3",), default="e4m3")
    settings.require("expert_dtype", ("fp8",), default="fp8")
    block = settings.values.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise settings.refuse("weight_block_size", f"must be two positive integers, got {str(block)[:80]!r}")
    unread = ACTIVATION_SCALES if is_static else ()
    return float8_scheme((block[0], block[1]) if block else None, (".weight_scale_inv", ".weight_scale"), unread)


def float8_scheme(block: tuple[int, int] | None, scale_names: tuple[str, ...], unread: tuple[str, ...] = ()) -> Scheme:
    """Matrices whose scales go by one of several names; tensors whose names end in one of `unread` may stand beside them."""
    build = partial(_build, block=block, scale_names=scale_names)
    return Scheme(".weight", (*scale_names, *unread), build, is_quantized=lambda tensor: tensor.dtype == FLOAT8)


def _build(stored: Stored, *, block: tuple[int, int] | None, scale_names: tuple[str, ...]) -> LazyTensor:
    shape = stored.need(".weight", (FLOAT8,)).shape
    num_outputs, num_inputs = shape
    names = [suffix for suffix in stored.parts if suffix in scale_names]
    if len(names) != 1:
        raise stored.fault(".weight", f"it must have one tensor of scales, got {len(names)}")
    scales = names[0]
    stored.need(scales, FLOATS, (0, 1, 2))
    if block is not None:
        stored.check_shape(scales, (-(-num_outputs // block[0]), -(-num_inputs // block[1])))
    else:
        stored.check_shape(scales, (), (1,), (1, 1), (num_outputs,), (num_outputs, 1))

    def values() -> np.ndarray:
        codes = stored.read(".weight")
        if ((codes.view(np.uint8) & NOT_A_NUMBER) == NOT_A_NUMBER).any():
            raise stored.fault(".weight", "a weight is not a number")
        return codes

    if not fp8.can_pack(shape, block):
        return LazyTensor(shape, "float32", lambda: fp8.dequantize(values(), stored.read(scales), block))

    def read() -> PackedWeight:
        return fp8.pack(values(), stored.read(scales), block)

    return packed_tensor(shape, fp8.abstract(shape, block), read)
