"""Checkpoints that others quantized, written here in the published layouts, one number at a time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoints.hf_folder import open_hf_folder
from jaxinfer.checkpoints.prequantized import unpack_quantized
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.quant.int8 import Int8Weight
from pallas_kernels.common.compare import row_error
from tests.checkpoints.checkpoint_files import HF_CONFIG

N, K = 24, 128
NAME = "model.layers.0.self_attn.q_proj"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclasses.dataclass(frozen=True)
class Example:
    """Tensors of one matrix under a format's names, and the float64 matrix [N K] that they stand for."""

    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]
    floats: np.ndarray
    name: str = f"{NAME}.weight"


def draws() -> np.random.Generator:
    return np.random.default_rng(0)


def halves(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.001, 0.1, shape).astype(np.float16)


def words(values: list[int], bits: int) -> int:
    """One int32 of several numbers, the first in the lowest bits."""
    word = sum(int(value) << (bits * place) for place, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def packed_along_first(values: np.ndarray, bits: int) -> np.ndarray:
    """[R C] -> int32 [R * bits / 32, C]."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, -len(values) % per_word), (0, 0)))
    rows = range(0, len(padded), per_word)
    return np.array(
        [[words(list(padded[row : row + per_word, column]), bits) for column in range(values.shape[1])] for row in rows], np.int32
    )


def packed_along_last(values: np.ndarray, bits: int) -> np.ndarray:
    return np.ascontiguousarray(packed_along_first(values.T, bits).T)


def grouped(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """[N K] floats of codes [N K] and [N C] zeros and scales."""
    group = np.arange(codes.shape[1]) // group_size
    return (codes.astype(np.float64) - zeros.astype(np.float64)[:, group]) * scales.astype(np.float64)[:, group]


def gptq(bits: int = 4, group_size: int = 32, version: str = "gptq", num_outputs: int = N) -> Example:
    size = group_size if group_size > 0 else K
    codes = draws().integers(0, 1 << bits, (num_outputs, K))
    zeros = draws().integers(1, 1 << bits, (num_outputs, K // size))
    scales = halves(num_outputs, K // size)
    tensors = {
        f"{NAME}.qweight": packed_along_first(codes.T, bits),
        f"{NAME}.qzeros": packed_along_last(zeros.T - (version == "gptq"), bits),
        f"{NAME}.scales": np.ascontiguousarray(scales.T),
        f"{NAME}.g_idx": (np.arange(K) // size).astype(np.int32),
    }
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "checkpoint_format": version,
        "sym": False,
    }
    return Example(settings, tensors, grouped(codes, zeros, scales, size))


def awq() -> Example:
    codes, zeros, scales = draws().integers(0, 16, (N, K)), draws().integers(0, 16, (N, 4)), halves(N, 4)

    def pack(values: np.ndarray) -> np.ndarray:
        """[R N] -> int32 [R, N / 8]: place i of a word takes column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return np.array([[words([row[first + place] for place in order], 4) for first in range(0, N, 8)] for row in values], np.int32)

    tensors = {f"{NAME}.qweight": pack(codes.T), f"{NAME}.qzeros": pack(zeros.T), f"{NAME}.scales": np.ascontiguousarray(scales.T)}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return Example(settings, tensors, grouped(codes, zeros, scales, 32))


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
    }


def pack_quantized(
    bits: int = 4, symmetric: bool = True, group_size: int = 32, zeros_are_packed: bool = True, num_inputs: int = K
) -> Example:
    half, size = 1 << (bits - 1), group_size or num_inputs
    codes = draws().integers(-half, half, (N, num_inputs))
    zeros = np.zeros((N, num_inputs // size), int) if symmetric else draws().integers(-half, half, (N, num_inputs // size))
    scales = halves(N, num_inputs // size)
    tensors = {
        f"{NAME}.weight_packed": packed_along_last(codes + half, bits),
        f"{NAME}.weight_scale": scales,
        f"{NAME}.weight_shape": np.array([N, num_inputs]),
    }
    if not symmetric:
        packed = packed_along_first(zeros + half, bits) if zeros_are_packed else zeros.astype(np.int8)
        tensors[f"{NAME}.weight_zero_point"] = packed
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel", "group_size": None, "dynamic": False}
    if group_size:
        weights |= {"strategy": "group", "group_size": group_size, "actorder": "weight"}
    return Example(compressed("pack-quantized", weights), tensors, grouped(codes, zeros, scales, size))


PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}


def int_quantized(activations: dict[str, Any] | None, strategy: str = "channel", symmetric: bool = True) -> Example:
    codes = draws().integers(-128, 128, (N, K)).astype(np.int8)
    scales = halves(N, 1) if strategy == "channel" else halves(1)
    zeros = np.zeros((N, 1), np.int8) if symmetric else draws().integers(-128, 128, (N, 1)).astype(np.int8)
    tensors = {f"{NAME}.weight": codes, f"{NAME}.weight_scale": scales}
    tensors |= {} if symmetric else {f"{NAME}.weight_zero_point": zeros}
    weights = INT8 | {"strategy": strategy, "symmetric": symmetric}
    floats = (codes.astype(np.float64) - zeros) * scales.astype(np.float64)
    return Example(compressed("int-quantized", weights, activations), tensors, floats)


def float8(num_outputs: int, num_inputs: int) -> np.ndarray:
    codes = draws().integers(0, 256, (num_outputs, num_inputs)).astype(np.uint8)
    codes[(codes & 127) == 127] = 3
    return codes.view(ml_dtypes.float8_e4m3fn)


def fp8_blocks(num_outputs: int = 200, num_inputs: int = 256) -> Example:
    values = float8(num_outputs, num_inputs)
    scales = np.random.default_rng(1).uniform(0.01, 1, (-(-num_outputs // 128), -(-num_inputs // 128))).astype(np.float32)
    n, k = np.mgrid[:num_outputs, :num_inputs]
    floats = values.astype(np.float64) * scales.astype(np.float64)[n // 128, k // 128]
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return Example(settings, {f"{NAME}.weight": values, f"{NAME}.weight_scale_inv": scales}, floats)


def fp8_tensor() -> Example:
    values = float8(N, K)
    tensors = {f"{NAME}.weight": values, f"{NAME}.weight_scale": np.array([0.25], ml_dtypes.bfloat16)}
    return Example({"quant_method": "fp8", "activation_scheme": "dynamic"}, tensors, values.astype(np.float64) / 4)


def float_quantized() -> Example:
    values, scales = float8(N, K), halves(N, 1)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    settings = compressed("float-quantized", weights, {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True})
    return Example(settings, {f"{NAME}.weight": values, f"{NAME}.weight_scale": scales}, values.astype(np.float64) * scales)


EXAMPLES: dict[str, Callable[[], Example]] = {
    "gptq": gptq,
    "gptq_v2_of_128": lambda: gptq(group_size=128, version="gptq_v2"),
    "gptq_8_bits": lambda: gptq(bits=8, num_outputs=25),
    "gptq_whole_rows": lambda: gptq(group_size=-1, num_outputs=21),
    "awq": awq,
    "pack_quantized": pack_quantized,
    "pack_quantized_8_bits": lambda: pack_quantized(bits=8, group_size=64),
    "pack_quantized_asymmetric": lambda: pack_quantized(symmetric=False),
    "pack_quantized_plain_zero_points": lambda: pack_quantized(symmetric=False, zeros_are_packed=False),
    "pack_quantized_channels": lambda: pack_quantized(group_size=0, num_inputs=76),
    "int_quantized_w8a8": lambda: int_quantized(PER_TOKEN),
    "int_quantized_w8a8_tensor": lambda: int_quantized(PER_TOKEN, strategy="tensor"),
    "int_quantized_w8a16": lambda: int_quantized(None),
    "int_quantized_asymmetric": lambda: int_quantized(PER_TOKEN, symmetric=False),
    "float_quantized": float_quantized,
    "fp8_blocks": fp8_blocks,
    "fp8_tensor": fp8_tensor,
}


def lazy(tensors: dict[str, np.ndarray]) -> dict[str, LazyTensor]:
    return {name: LazyTensor(values.shape, values.dtype.name, lambda values=values: values) for name, values in tensors.items()}


def unpacked(example: Example) -> LazyTensor:
    others = {
        "model.norm.weight": np.ones(K, np.float32),
        f"{NAME}.bias": np.ones(N, np.float16),
        "lm_head.weight": np.ones((2, K), np.float32),
    }
    config, tensors = unpack_quantized({"a": 1, "quantization_config": example.settings}, lazy(example.tensors | others), "model")
    assert config == {"a": 1}
    assert set(tensors) == {*others, example.name}
    for name, values in others.items():
        np.testing.assert_array_equal(tensors[name].read(), values)
    return tensors[example.name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_matrix_of_every_format(name: str) -> None:
    """Read as floats exactly, and multiplied as it is stored."""
    example = EXAMPLES[name]()
    tensor = unpacked(example)
    assert (tensor.shape, tensor.dtype) == (example.floats.shape, "float32")
    floats = tensor.read()
    np.testing.assert_allclose(floats, example.floats, rtol=2e-7, atol=1e-9)
    assert tensor.packed is not None
    weight, struct = tensor.packed.read(), tensor.packed.abstract
    assert jax.tree.structure(weight) == jax.tree.structure(struct)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(weight)] == [(b.shape, b.dtype) for b in jax.tree.leaves(struct)]
    x = np.random.default_rng(5).standard_normal((3, floats.shape[1])).astype(np.float32)
    output = np.asarray(jax.tree.map(jnp.asarray, weight).matmul(jnp.asarray(x)))
    assert row_error(output, x @ example.floats.T) <= (1e-3 if "w8a8" in name else 1e-6)
    assert isinstance(weight, Int8Weight) == ("w8a8" in name)


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if not name.startswith("int_quantized") and "float" not in name and "fp8" not in name]
)
def test_four_bits_stay_small(name: str) -> None:
    example = EXAMPLES[name]()
    packed = unpacked(example).packed
    assert packed is not None
    stored = sum(values.nbytes for key, values in example.tensors.items() if not key.endswith(("g_idx", "shape")))
    # A zero point takes a byte instead of 4 bits; rows that are no whole runs of 32 take a byte for each weight.
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(packed.read())) <= (2 if name == "pack_quantized_channels" else 1.1) * stored


def test_float8_with_a_cut_block_is_read_as_floats() -> None:
    example = fp8_blocks(130, 192)
    tensor = unpacked(example)
    assert tensor.packed is None
    np.testing.assert_allclose(tensor.read(), example.floats, rtol=2e-7)


@pytest.mark.parametrize("name", ["fp8_tensor", "float_quantized", "int_quantized_w8a8", "pack_quantized"])
def test_fixed_scales_of_activations_are_left_alone(name: str) -> None:
    """The weights are what they are without; activations stay floats, which is nearer to the model than their rounding."""
    example = EXAMPLES[name]()
    fixed = {"num_bits": 8, "type": "int" if name.startswith("int") else "float", "strategy": "tensor", "dynamic": False}
    group = example.settings.get("config_groups", {}).get("group_0", {}) | {"input_activations": fixed}
    is_fp8 = name == "fp8_tensor"
    change: dict[str, Any] = {"activation_scheme": "static"} if is_fp8 else {"config_groups": {"group_0": group}}
    scales = {f"{NAME}.input_scale": np.array([0.5], np.float32), f"{NAME}.input_zero_point": np.zeros(1, np.int8)}
    tensor = unpacked(dataclasses.replace(example, settings=example.settings | change, tensors=example.tensors | scales))
    np.testing.assert_allclose(tensor.read(), example.floats, rtol=2e-7, atol=1e-9)
    assert tensor.packed is not None and not isinstance(tensor.packed.read(), Int8Weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_in_the_order_of_their_activations(bits: int) -> None:
    """GPTQ's desc_act: g_idx says which group an input belongs to. In order it is packed as without, else it becomes floats."""
    example = gptq(bits=bits)
    in_order = dataclasses.replace(example, settings=example.settings | {"desc_act": True})
    assert unpacked(in_order).packed is not None
    groups = np.random.default_rng(3).permutation(example.tensors[f"{NAME}.g_idx"])
    codes = draws().integers(0, 1 << bits, (N, K))  # what gptq() drew
    made = grouped(codes, np.zeros((N, K // 32)), np.ones((N, K // 32)), 32)
    scales = example.tensors[f"{NAME}.scales"].T.astype(np.float64)
    zero_points = made[:, ::32] - example.floats[:, ::32] / scales
    tensor = unpacked(dataclasses.replace(in_order, tensors=example.tensors | {f"{NAME}.g_idx": groups}))
    assert (tensor.packed, tensor.shape, tensor.dtype) == (None, (N, K), "float32")
    np.testing.assert_allclose(tensor.read(), (codes - zero_points[:, groups]) * scales[:, groups], rtol=2e-6, atol=1e-6)
    for wrong in (groups - 1, groups + 1):
        broken = unpacked(dataclasses.replace(in_order, tensors=example.tensors | {f"{NAME}.g_idx": wrong}))
        with pytest.raises(CheckpointError, match="groups must be from 0 to 3") as raised:
            broken.read()
        assert raised.value.field == f"{NAME}.g_idx"


def mxfp4_example() -> tuple[dict[str, np.ndarray], np.ndarray]:
    experts, outputs, runs = 3, 6, 2
    blocks = draws().integers(0, 256, (experts, outputs, runs, 16)).astype(np.uint8)
    scales = draws().integers(118, 132, (experts, outputs, runs)).astype(np.uint8)
    floats = np.empty((experts, outputs, runs * 32))
    for index in np.ndindex(*blocks.shape):
        power = 2.0 ** (int(scales[index[:3]]) - 127)
        for nibble in range(2):
            floats[(*index[:2], index[2] * 32 + index[3] * 2 + nibble)] = FP4[int(blocks[index]) >> (4 * nibble) & 15] * power
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    return {f"{stem}_blocks": blocks, f"{stem}_scales": scales, f"{stem}_bias": np.ones((experts, outputs), np.float32)}, floats


def test_experts_of_gpt_oss() -> None:
    """Floats as a plain checkpoint has them, [X, in, out]; packed ones as every packed matrix, [X, out, in]."""
    stored, floats = mxfp4_example()
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    _, tensors = unpack_quantized(config, lazy(stored), "model")
    assert set(tensors) == {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj_bias"}
    tensor = tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert (tensor.shape, tensor.dtype) == ((3, 64, 6), "bfloat16")
    assert tensor.read().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensor.read().astype(np.float64), floats.swapaxes(1, 2))
    assert tensor.packed is not None
    weight = tensor.packed.read()
    np.testing.assert_array_equal(weight.dequantize(), floats)
    assert [leaf.shape for leaf in jax.tree.leaves(weight)] == [leaf.shape for leaf in jax.tree.leaves(tensor.packed.abstract)]


def test_a_folder(tmp_path: Path) -> None:
    """Through config.json and safetensors, as a person's checkpoint comes."""
    example = gptq()
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG | {"quantization_config": example.settings}))
    embedding = {"model.embed_tokens.weight": np.ones((260, K), np.float32)}
    save_file(example.tensors | embedding, tmp_path / "model.safetensors")
    checkpoint = open_hf_folder(tmp_path)
    assert "quantization_config" not in checkpoint.config
    assert set(checkpoint.tensors) == {example.name, *embedding}
    np.testing.assert_allclose(checkpoint.tensors[example.name].read(), example.floats, rtol=2e-7)


def test_a_plain_checkpoint_is_left_alone() -> None:
    config, tensors = {"a": 1}, lazy({"x.weight_scale": np.ones(3)})
    assert unpack_quantized(config, tensors, "model") == (config, tensors)


WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("example", "changes", "field"),
    [
        (gptq, {"quant_method": "bitsandbytes"}, "quant_method"),
        (gptq, {"quant_method": "unpack"}, "quant_method"),
        (gptq, {"bits": 3}, "bits"),
        (gptq, {"desc_act": "yes"}, "desc_act"),
        (gptq, {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (gptq, {"group_size": "128"}, "group_size"),
        (gptq, {"dynamic": {"-:.*": {}}}, "dynamic"),
        (awq, {"version": "gemv"}, "version"),
        (awq, {"zero_point": False}, "zero_point"),
        (fp8_blocks, {"activation_scheme": "rows"}, "activation_scheme"),
        (fp8_blocks, {"weight_block_size": [128]}, "weight_block_size"),
        (fp8_blocks, {"fmt": "e5m2"}, "fmt"),
        (pack_quantized, {"format": "nvfp4-pack-quantized"}, "format"),
        (pack_quantized, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (pack_quantized, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (pack_quantized, {"sparsity_config": "2:4"}, "sparsity_config"),
        (pack_quantized, {"quantization_status": "calibration"}, "quantization_status"),
        (pack_quantized, {f"{WEIGHTS}.strategy": "tensor_group"}, f"{WEIGHTS}.strategy"),
        (pack_quantized, {f"{WEIGHTS}.actorder": "group"}, f"{WEIGHTS}.actorder"),
        (pack_quantized, {f"{WEIGHTS}.num_bits": 3}, f"{WEIGHTS}.num_bits"),
        (pack_quantized, {"config_groups.group_1": {"weights": {"num_bits": 8}}}, "config_groups"),
        (lambda: int_quantized(PER_TOKEN), {"config_groups.group_0.input_activations.dynamic": "local"}, "input_activations.dynamic"),
        (float_quantized, {f"{WEIGHTS}.symmetric": False}, f"{WEIGHTS}.symmetric"),
    ],
)
def test_what_is_not_implemented_is_named(example: Callable[[], Example], changes: dict[str, Any], field: str) -> None:
    made = example()
    settings = json.loads(json.dumps(made.settings))
    for path, value in changes.items():
        *outer, last = path.split(".")
        inner = settings
        for key in outer:
            inner = inner[key]
        inner[last] = value
    with pytest.raises(UnsupportedModelError, match=rf"model: quantization_config.*{field} (must|is not)"):
        unpacked(dataclasses.replace(made, settings=settings))


@pytest.mark.parametrize(
    ("example", "suffix", "tensor", "reason"),
    [
        (gptq, "qzeros", None, "missing"),
        (gptq, "scales", np.ones((5, N), np.float16), "shape"),
        (gptq, "qzeros", np.ones((4, 2), np.int32), "shape"),
        (gptq, "qweight", np.ones((16, N), np.int64), "dtype"),
        (gptq, "qweight", np.ones((15, N), np.int32), "do not divide"),
        (gptq, "g_idx", np.zeros(9, np.int32), "shape"),
        (awq, "scales", np.ones((4, N), np.int8), "dtype"),
        (awq, "qzeros", np.ones(4, np.int32), "dimensions"),
        (pack_quantized, "weight_packed", np.ones((N, 15), np.int32), "do not hold"),
        (pack_quantized, "weight_scale", np.ones((N + 1, 4), np.float16), "shape"),
        (lambda: pack_quantized(symmetric=False), "weight_zero_point", np.ones((2, 4), np.int32), "shape"),
        (lambda: int_quantized(PER_TOKEN), "weight_scale", np.ones((3, 1), np.float16), "shape"),
        (lambda: int_quantized(PER_TOKEN, symmetric=False), "weight_zero_point", None, "missing"),
        (fp8_blocks, "weight_scale_inv", np.ones((1, 2), np.float32), "shape"),
        (fp8_blocks, "weight_scale_inv", None, "one tensor of scales"),
    ],
)
def test_parts_that_do_not_fit(example: Callable[[], Example], suffix: str, tensor: np.ndarray | None, reason: str) -> None:
    """Refused before anything is read, naming the file and the tensor."""
    made = example()
    tensors = {name: LazyTensor(stored.shape, stored.dtype, lambda: pytest.fail("read")) for name, stored in lazy(made.tensors).items()}
    del tensors[f"{NAME}.{suffix}"]
    if tensor is not None:
        tensors |= lazy({f"{NAME}.{suffix}": tensor})
    with pytest.raises(CheckpointError, match=reason) as raised:
        unpack_quantized({"quantization_config": made.settings}, tensors, "model")
    named = "weight" if "one tensor" in reason else suffix
    assert (raised.value.file, raised.value.field) == ("model", f"{NAME}.{named}")


def test_tensors_without_their_matrix() -> None:
    made = gptq()
    for orphan in ("other.qzeros", "other.scales"):
        with pytest.raises(CheckpointError, match="not there"):
            unpack_quantized({"quantization_config": made.settings}, lazy(made.tensors | {orphan: np.ones((1, 1), np.int32)}), "model")
    with pytest.raises(CheckpointError, match="as well"):
        unpack_quantized({"quantization_config": made.settings}, lazy(made.tensors | {made.name: np.ones((N, K))}), "model")
    with pytest.raises(UnsupportedModelError, match="input_scale"):
        stored = fp8_tensor()
        unpack_quantized({"quantization_config": stored.settings}, lazy(stored.tensors | {f"{NAME}.input_scale": np.ones(1)}), "model")


@pytest.mark.parametrize(
    ("example", "suffix", "change", "reason"),
    [
        (gptq, "g_idx", lambda values: values[::-1].copy(), "not grouped in order"),
        (pack_quantized, "weight_shape", lambda values: values + 1, "does not say"),
        (fp8_tensor, "weight", lambda values: np.full_like(values, np.nan), "not a number"),
    ],
)
def test_values_that_cannot_be(
    example: Callable[[], Example], suffix: str, change: Callable[[np.ndarray], np.ndarray], reason: str
) -> None:
    made = example()
    name = f"{NAME}.{suffix}"
    tensor = unpacked(dataclasses.replace(made, tensors=made.tensors | {name: change(made.tensors[name])}))
    with pytest.raises(CheckpointError, match=reason):
        tensor.read()


def test_a_configuration_that_is_no_object() -> None:
    with pytest.raises(CheckpointError, match="must be an object"):
        unpack_quantized({"quantization_config": "gptq"}, {}, "model")
