"""GGUF -> Hugging Face's names, layout, configuration and values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.gguf import unpermute_rows
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints.checkpoint_files import (
    EMBED,
    HEAD_DIM,
    HEADS,
    HF_CONFIG,
    gguf_tensors,
    hf_tensors,
    llama_cpp_rows,
    write_gguf,
)


@pytest.mark.parametrize("tied", [True, False])
def test_names_layout_and_values(tmp_path: Path, tied: bool) -> None:
    tensors = hf_tensors(tied=tied)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "tiny.gguf", gguf_tensors(tensors))))
    assert checkpoint.name == "tiny"
    assert checkpoint.config == {**HF_CONFIG, "tie_word_embeddings": tied}
    assert checkpoint.generation_config == {"bos_token_id": 256, "eos_token_id": 257}
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in checkpoint.tensors.items():
        assert (tensor.shape, tensor.dtype) == (tensors[name].shape, "float32")
        np.testing.assert_array_equal(tensor.read(), tensors[name], err_msg=name)


def test_rotating_neighbours_of_the_files_rows_equals_rotating_halves_of_ours() -> None:
    """The meaning of the row order, from the two rope formulas: the scores of queries and keys are the same."""
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal(EMBED)
    ours = rng.standard_normal((HEAD_DIM, EMBED))
    angles = 7 / 10000 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles), np.sin(angles)

    def score_of_neighbours(rows: np.ndarray) -> float:
        vector = rows @ hidden
        even, odd = vector[0::2], vector[1::2]
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=1).reshape(-1)
        return float(turned @ vector)

    def score_of_halves(rows: np.ndarray) -> float:
        vector = rows @ hidden
        first, second = vector[: HEAD_DIM // 2], vector[HEAD_DIM // 2 :]
        return float(np.concatenate([first * cos - second * sin, first * sin + second * cos]) @ vector)

    stored = llama_cpp_rows(ours, 1)
    assert score_of_neighbours(stored) == pytest.approx(score_of_halves(unpermute_rows(stored, 1)))
    assert score_of_neighbours(stored) != pytest.approx(score_of_halves(stored))


def test_biases_of_all_projections_are_read_and_reordered(tmp_path: Path) -> None:
    tensors, rng = gguf_tensors(hf_tensors()), np.random.default_rng(3)
    queries = rng.standard_normal(HEADS * HEAD_DIM).astype(np.float32)
    for name in list(tensors):
        if ".attn_" in name and "norm" not in name:
            rows = tensors[name].shape[0]
            tensors[name.replace("weight", "bias")] = llama_cpp_rows(queries, HEADS) if "_q." in name else np.ones(rows, np.float32)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", tensors)))
    assert checkpoint.config["attention_bias"] is True
    np.testing.assert_array_equal(checkpoint.tensors["model.layers.1.self_attn.q_proj.bias"].read(), queries)
    del tensors["blk.1.attn_output.bias"]
    with pytest.raises(UnsupportedModelError, match="biases on some"):
        open_checkpoint(str(write_gguf(tmp_path / "b.gguf", tensors)))


def q4_1_plain(raw: bytes) -> list[float]:
    """One block of 32: float16 scale, float16 minimum, then 16 bytes; low halves are values 0..15, high halves 16..31."""
    scale, minimum = (float(x) for x in np.frombuffer(raw[:4], "<f2"))
    return [scale * q + minimum for q in [*(byte & 15 for byte in raw[4:]), *(byte >> 4 for byte in raw[4:])]]


def q8_0_plain(raw: bytes) -> list[float]:
    """One block of 32: float16 scale, then 32 signed bytes."""
    return [float(np.frombuffer(raw[:2], "<f2")[0]) * int(value) for value in np.frombuffer(raw[2:], "i1")]


@pytest.mark.parametrize(("kind", "plain"), [(GGMLQuantizationType.Q4_1, q4_1_plain), (GGMLQuantizationType.Q8_0, q8_0_plain)])
def test_quantised_values_by_the_formula(tmp_path: Path, kind: GGMLQuantizationType, plain: Any) -> None:
    tensors = gguf_tensors(hf_tensors())
    raw = gguf.quants.quantize(tensors["blk.0.ffn_down.weight"], kind)
    tensors["blk.0.ffn_down.weight"] = raw
    got = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", tensors, kinds={"blk.0.ffn_down.weight": kind})))
    size = GGML_QUANT_SIZES[kind][1]
    expected = [plain(raw.tobytes()[start : start + size]) for start in range(0, raw.nbytes, size)]
    values = got.tensors["model.layers.0.mlp.down_proj.weight"].read()
    np.testing.assert_allclose(values.reshape(-1, 32), expected, rtol=1e-6, atol=1e-7)


def dequantizable() -> list[GGMLQuantizationType]:
    """Every block type that gguf itself can dequantise."""
    kinds = []
    for kind, (block_size, type_size) in GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, type_size), np.uint8), kind)
        except NotImplementedError:
            continue
        if block_size > 1:
            kinds.append(kind)
    return kinds


def test_gguf_can_dequantise_what_is_tested_below() -> None:
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"} <= {k.name for k in dequantizable()}


@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_every_block_type_equals_the_library(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    block_size, type_size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 48, (4, type_size), dtype=np.uint8)  # below 48 a float16 scale stays small, whichever its bytes are
    metadata = {"llama.feed_forward_length": 4, "llama.embedding_length": block_size, "llama.attention.key_length": HEAD_DIM}
    shapes = {"attn_q": (32, block_size), "attn_k": (16, block_size), "attn_v": (16, block_size), "attn_output": (block_size, 32)}
    shapes |= {"attn_norm": (block_size,), "ffn_norm": (block_size,), "ffn_up": (4, block_size), "ffn_down": (block_size, 4)}
    tensors = {f"blk.{layer}.{part}.weight": np.ones(shape, np.float32) for layer in range(2) for part, shape in shapes.items()}
    tensors |= {f"blk.{layer}.ffn_gate.weight": raw for layer in range(2)}
    tensors |= {"token_embd.weight": np.ones((260, block_size), np.float32), "output_norm.weight": np.ones(block_size, np.float32)}
    kinds = dict.fromkeys(["blk.0.ffn_gate.weight", "blk.1.ffn_gate.weight"], kind)
    path = write_gguf(tmp_path / "a.gguf", tensors, metadata, kinds=kinds)
    tensor = open_checkpoint(str(path)).tensors["model.layers.1.mlp.gate_proj.weight"]
    theirs = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_gate.weight")
    expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
    assert np.all(np.isfinite(expected))
    assert tensor.shape == expected.shape == (4, block_size)
    np.testing.assert_array_equal(tensor.read(), expected)


@pytest.mark.parametrize(("name", "dtype"), [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_half_precision_stays_as_it_is_stored(tmp_path: Path, name: str, dtype: Any) -> None:
    ours = hf_tensors()
    stored = {key: value.astype(dtype) for key, value in gguf_tensors(ours).items()}
    kind = GGMLQuantizationType[name]
    raw = {key: value.view(np.uint8) if name == "BF16" else value for key, value in stored.items()}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", raw, kinds=dict.fromkeys(raw, kind))))
    for key, tensor in checkpoint.tensors.items():
        assert tensor.dtype == np.dtype(dtype).name
        values = tensor.read()
        assert values.dtype == dtype
        np.testing.assert_array_equal(values.astype(np.float32), ours[key].astype(dtype).astype(np.float32))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_tensors())
    tensors["output_norm.weight"] = np.ones(EMBED, np.int32)
    with pytest.raises(UnsupportedModelError, match=r"output_norm\.weight.*I32"):
        open_checkpoint(str(write_gguf(tmp_path / "a.gguf", tensors)))


@pytest.mark.parametrize(
    ("metadata", "error", "field"),
    [
        ({"llama.block_count": None}, CheckpointError, "llama.block_count"),
        ({"llama.block_count": 0}, CheckpointError, "llama.block_count"),
        ({"llama.block_count": 3}, CheckpointError, "blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, CheckpointError, "blk.1"),
        ({"llama.block_count": 2**31}, CheckpointError, "llama.block_count"),
        ({"llama.block_count": 2**30}, CheckpointError, "llama.block_count"),
        ({"llama.block_count": "two"}, CheckpointError, "llama.block_count"),
        ({"llama.context_length": None}, CheckpointError, "llama.context_length"),
        ({"llama.embedding_length": 48}, CheckpointError, "rope.dimension_count"),
        ({"llama.feed_forward_length": 63}, CheckpointError, "ffn_"),
        ({"llama.attention.head_count_kv": 3}, CheckpointError, "llama.attention.head_count_kv"),
        ({"llama.attention.head_count_kv": 1}, CheckpointError, "attn_k"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, CheckpointError, "llama.attention.layer_norm_rms_epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, CheckpointError, "llama.attention.layer_norm_rms_epsilon"),
        ({"llama.rope.freq_base": float("inf")}, CheckpointError, "llama.rope.freq_base"),
        ({"llama.rope.freq_base": -1.0}, CheckpointError, "llama.rope.freq_base"),
        ({"llama.rope.dimension_count": 4}, UnsupportedModelError, "rope.dimension_count"),
        ({"llama.attention.value_length": 4}, UnsupportedModelError, "attention.value_length"),
        ({"llama.vocab_size": 261}, CheckpointError, "llama.vocab_size"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "llama.expert_count"),
        ({"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 4.0}, UnsupportedModelError, "spiral"),
        ({"tokenizer.ggml.eos_token_id": 260}, CheckpointError, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eot_token_id": 260}, CheckpointError, "tokenizer.ggml.eot_token_id"),
        ({"split.count": 2}, UnsupportedModelError, "split"),
    ],
)
def test_metadata_that_does_not_fit_is_named(tmp_path: Path, metadata: dict[str, Any], error: type[Exception], field: str) -> None:
    error = UnsupportedModelError if field == "rope.dimension_count" else error
    with pytest.raises(error, match=re.escape(field)):
        open_checkpoint(str(write_gguf(tmp_path / "a.gguf", metadata=metadata)))


def test_another_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported: llama, qwen2, qwen3, gemma2, gemma3, phi3"):
        open_checkpoint(str(write_gguf(tmp_path / "a.gguf", architecture="mamba")))


def test_a_vector_in_blocks_is_dequantised_and_refused_where_its_rows_are_reordered(tmp_path: Path) -> None:
    tensors, kind = gguf_tensors(hf_tensors()), GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(tensors["output_norm.weight"], kind)
    tensors["output_norm.weight"] = raw
    path = write_gguf(tmp_path / "a.gguf", tensors, kinds={"output_norm.weight": kind})
    values = open_checkpoint(str(path)).tensors["model.norm.weight"].read()
    np.testing.assert_allclose(values, q8_0_plain(raw.tobytes()), rtol=1e-6)
    kinds = {}
    for name in list(tensors):
        if ".attn_" in name and "norm" not in name:
            bias = name.replace("weight", "bias")
            rows = np.ones(tensors[name].shape[0], np.float32)
            tensors[bias] = rows if rows.size % 32 else gguf.quants.quantize(rows, kind)
            kinds |= {} if rows.size % 32 else {bias: kind}
    tensors["output_norm.weight"] = np.ones(EMBED, np.float32)
    with pytest.raises(UnsupportedModelError, match="whose rows cannot be put in order"):
        open_checkpoint(str(write_gguf(tmp_path / "b.gguf", tensors, kinds=kinds)))


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = gguf_tensors(hf_tensors())
    del tensors[name]
    with pytest.raises(CheckpointError, match="missing") as caught:
        open_checkpoint(str(write_gguf(tmp_path / "a.gguf", tensors)))
    assert caught.value.field == name


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_tensors()) | {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(CheckpointError, match="no place") as caught:
        open_checkpoint(str(write_gguf(tmp_path / "a.gguf", tensors)))
    assert caught.value.field == "blk.0.attn_q_norm.weight"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_rope_scaling(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    config = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", metadata=metadata))).config
    assert config["rope_scaling"] == expected


def llama3_divisors(theta: float, factor: float) -> list[float]:
    """Frequency before over frequency after, as Meta's release of Llama 3.1 computes it (low 1, high 4, context 8192)."""
    divisors = []
    for index in range(0, HEAD_DIM, 2):
        frequency = theta ** (-index / HEAD_DIM)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(frequency / ((1 - smooth) * frequency / factor + smooth * frequency))
    return divisors


def test_llama3_rope_factors_become_the_parameters_that_gave_them(tmp_path: Path) -> None:
    metadata = {"llama.rope.freq_base": 500000.0}
    divisors = llama3_divisors(500000.0, 32.0)
    assert len(set(divisors)) == 3
    tensors = gguf_tensors(hf_tensors()) | {"rope_freqs.weight": np.array(divisors, np.float32)}
    config = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", tensors, metadata))).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    tensors["rope_freqs.weight"] = np.array([1, 1.1, 2, 3], np.float32)
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        open_checkpoint(str(write_gguf(tmp_path / "b.gguf", tensors, metadata)))


def test_two_tokens_that_end_a_turn(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "a.gguf", metadata={"tokenizer.ggml.eot_token_id": 258})))
    assert checkpoint.generation_config["eos_token_id"] == [257, 258]
    assert checkpoint.config["eos_token_id"] == 257


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    tensors = open_checkpoint(str(path)).tensors
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match="changed while it was open") as caught:
        for tensor in tensors.values():
            tensor.read()
    assert caught.value.file == str(path)


def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(str(smollm2_path))
    assert sum(np.prod(tensor.shape, dtype=int) for tensor in checkpoint.tensors.values()) == 134_515_008
    expected = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True}
    assert checkpoint.config.items() >= {**expected, "rope_theta": 1e5, "rms_norm_eps": 1e-5, "vocab_size": 49152}.items()


def test_a_field_repeated_for_each_layer(tmp_path: Path) -> None:
    repeated = {"llama.attention.head_count_kv": [2, 2]}
    assert open_checkpoint(str(write_gguf(tmp_path / "a.gguf", metadata=repeated))).config["num_key_value_heads"] == 2
    with pytest.raises(CheckpointError, match="head_count_kv"):
        open_checkpoint(str(write_gguf(tmp_path / "b.gguf", metadata={"llama.attention.head_count_kv": [2, 1]})))
