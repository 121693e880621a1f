"""gpt_oss's experts: `gate_up_proj_blocks` uint8 [X, N, K / 32, 16] and `gate_up_proj_scales` uint8 [X, N, K / 32].

They become `gate_up_proj`, which a plain checkpoint stores as [X, K, N]: so does `read()`; `packed` is [X N K] as every packed
tensor is.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.prequantized.scheme import Scheme, Settings, Stored
from jaxinfer.checkpoints.source import LazyTensor, PackedTensor
from jaxinfer.quant import mxfp4
from jaxinfer.quant.packed import PackedWeight


def make_scheme(settings: Settings) -> Scheme:
    """The scheme of a `quantization_config`, which says nothing but which modules are left out."""
    return Scheme("_blocks", ("_scales",), _build, plain="")


def _build(stored: Stored) -> LazyTensor:
    blocks = stored.need("_blocks", ("uint8",), 4)
    num_experts, num_outputs, num_blocks, num_bytes = blocks.shape
    if num_bytes != mxfp4.RUN // 2:
        raise stored.fault("_blocks", f"a block must have {mxfp4.RUN // 2} bytes, got {num_bytes}")
    stored.need("_scales", ("uint8",), 3)
    stored.check_shape("_scales", (num_experts, num_outputs, num_blocks))

    def read_packed() -> PackedWeight:
        return mxfp4.pack(stored.read("_blocks"), stored.read("_scales"))

    def read() -> np.ndarray:
        floats = np.empty((num_experts, num_blocks * mxfp4.RUN, num_outputs), ml_dtypes.bfloat16)
        all_blocks, all_scales = stored.read("_blocks"), stored.read("_scales")
        for expert in range(num_experts):  # the float32 values of one at a time
            floats[expert] = mxfp4.pack(all_blocks[expert], all_scales[expert]).dequantize().T
        return floats

    abstract = mxfp4.abstract((num_experts, num_outputs, num_blocks * mxfp4.RUN))
    # bfloat16 holds these values exactly.
    return LazyTensor((num_experts, num_blocks * mxfp4.RUN, num_outputs), "bfloat16", read, PackedTensor(abstract, read_packed))
