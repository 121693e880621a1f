"""What "auto" means for storage and rows, and options that would be ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoints.load import Storage
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.layers.weights import WeightSpec
from jaxinfer.quant import measured
from jaxinfer.quant.int4 import Int4
from jaxinfer.quant.int8 import Int8Weight
from jaxinfer.quant.parts import Parts
from jaxinfer.quant.weight import method
from jaxinfer.startup import resolve_kv_dtype, resolve_min_rows, resolve_storage

PLAIN = jax.ShapeDtypeStruct((4, 32), jnp.float32)
PACKED = Int4().abstract((4, 32))
INT8 = Int8Weight.abstract((4, 32))


def slot(value: Any, *shape: int) -> Any:
    """As much of a WeightSlot as is asked for."""
    module = SimpleNamespace(weight=SimpleNamespace(get_value=lambda: value))
    return SimpleNamespace(module=module, name="weight", spec=WeightSpec(("x",), shape, (None,) * len(shape)))


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ([PACKED], {"auto": 1, "on": 1, "off": 1}),
        ([PLAIN], {"auto": 1, "on": 8, "off": 1}),
        ([PACKED, PLAIN], {"auto": 1, "on": 8, "off": 1}),
        ([INT8, PACKED], {"auto": 8, "on": 8, "off": 8}),
        ([Parts((PACKED, INT8))], {"auto": 8, "on": 8, "off": 8}),
    ],
)
def test_rows_that_equal_bits_take(values: list[Any], rows: dict[str, int]) -> None:
    """A norm's weight, which is a vector, asks for nothing."""
    slots = [slot(value, 4, 32) for value in values] + [slot(jax.ShapeDtypeStruct((4,), np.float32), 4)]
    assert {setting: resolve_min_rows(setting, slots) for setting in rows} == rows


def test_storage() -> None:
    assert resolve_storage(EngineConfig()).keeps_packed
    floats = resolve_storage(EngineConfig(quantization="none"))
    assert floats.method is None and not floats.keeps_packed
    given = resolve_storage(
        EngineConfig(quantization="int4", quantization_group_size=64, quantization_zero_point="off", quantize_embeddings="off")
    )
    assert given == Storage(method=Int4(64, zero_point=False), vocabulary=Storage())
    chosen = resolve_storage(EngineConfig(quantization="int4"))
    assert chosen.method == Int4(32, zero_point=measured.ZERO_POINT_PAYS)
    assert chosen.vocabulary == Storage(method=method("int8_weight_only")), "int4 is too coarse for a vocabulary"
    assert resolve_storage(EngineConfig(quantization="int4", quantize_embeddings="on")).vocabulary is None


def test_kv_dtype() -> None:
    assert resolve_kv_dtype("auto", jnp.dtype("bfloat16")) == "bfloat16"
    assert resolve_kv_dtype("int8", jnp.dtype("float32")) == "int8"
    assert resolve_kv_dtype("fp8", jnp.dtype("float32")) == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int3"}, "--quantization must be one of auto, none, int8"),
        ({"quantization": "int4", "quantization_group_size": 48}, "--quantization-group-size must be one of 32, 64, 128, got 48"),
        ({"quantization": "int8", "quantization_group_size": 64}, "--quantization-group-size is for --quantization int4"),
        ({"quantization_zero_point": "on"}, "--quantization-zero-point is for --quantization int4"),
        ({"quantization": "none", "quantize_embeddings": "on"}, "--quantize-embeddings on needs"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype must be one of"),
    ],
)
def test_options_that_do_not_fit_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(**options)
