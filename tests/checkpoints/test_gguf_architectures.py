"""The architectures beside llama: names by gguf's own table, configurations as transformers understands them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from tests.checkpoints.architectures import CASES, COMMON_CONFIG, FULL, GEMMA2, GEMMA3, HALF, LAYERS, PHI3, QWEN2, QWEN3, SLIDING, Case
from tests.checkpoints.checkpoint_files import write_gguf

PER_ARCHITECTURE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.architecture)


@PER_ARCHITECTURE
def test_names_layout_and_values(tmp_path: Path, case: Case) -> None:
    checkpoint, expected = open_checkpoint(str(case.write(tmp_path / "a.gguf"))), case.tensors()
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in checkpoint.tensors.items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, "float32")
        # 1 + w was rounded to float32 when it was written
        np.testing.assert_allclose(tensor.read(), expected[name], rtol=0, atol=1e-6 if case.is_offset else 0, err_msg=name)


@PER_ARCHITECTURE
def test_configuration(tmp_path: Path, case: Case) -> None:
    config = open_checkpoint(str(case.write(tmp_path / "a.gguf"))).config
    assert config == {**COMMON_CONFIG, **case.config, "tie_word_embeddings": case.is_tied}


@PER_ARCHITECTURE
def test_transformers_takes_the_configuration(tmp_path: Path, case: Case) -> None:
    config = dict(open_checkpoint(str(case.write(tmp_path / "a.gguf"))).config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == case.config["architectures"][0].removesuffix("ForCausalLM") + (
        "TextConfig" if case is GEMMA3 else "Config"
    )
    renamed = ("rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype", "original_max_position_embeddings")
    for name, value in config.items():
        if name not in renamed:
            assert getattr(theirs, name) == value, name
    ropes = theirs.rope_parameters if case is GEMMA3 else {"all": theirs.rope_parameters}
    assert ropes[FULL if case is GEMMA3 else "all"]["rope_theta"] == config["rope_theta"]
    if case is GEMMA3:
        assert ropes[SLIDING] == {"rope_type": "default", "rope_theta": 1e4}


@PER_ARCHITECTURE
@pytest.mark.parametrize("part", ["attn_norm", "ffn_down", "attn_output"])
def test_a_missing_tensor_is_named(tmp_path: Path, case: Case, part: str) -> None:
    path = case.write(tmp_path / "a.gguf")
    whole = path.read_bytes()
    name = f"blk.3.{part}.weight".encode()
    assert whole.count(name) == 1
    path.write_bytes(whole.replace(name, name[:-1] + b"T"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    assert caught.value.field == name.decode()


@pytest.mark.parametrize(("case", "name"), [(QWEN2, "blk.2.attn_v.bias"), (QWEN3, "blk.2.attn_q_norm.weight")])
def test_what_an_architecture_always_has(tmp_path: Path, case: Case, name: str) -> None:
    path = case.write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes().replace(name.encode(), name[:-1].encode() + b"T"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("case", "fields", "expected"),
    [
        (GEMMA2, {"attention.sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}, (4096, 50.0, 30.0)),
        (GEMMA3, {"final_logit_softcapping": 12.0}, (24, None, 12.0)),
    ],
)
def test_windows_and_caps_that_are_not_stated(tmp_path: Path, case: Case, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    config = open_checkpoint(str(case.write(tmp_path / "a.gguf", fields))).config
    names = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    assert tuple(config[name] for name in names) == expected


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False, True]])
def test_another_pattern_of_windows(tmp_path: Path, pattern: Any) -> None:
    config = open_checkpoint(str(GEMMA3.write(tmp_path / "a.gguf", {"attention.sliding_window_pattern": pattern}))).config
    assert config["layer_types"] == [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING]
    with pytest.raises(CheckpointError, match=f"each of {LAYERS} layers"):
        open_checkpoint(str(GEMMA3.write(tmp_path / "b.gguf", {"attention.sliding_window_pattern": [True, False]})))


def test_the_second_rope_and_linear_scaling_of_gemma3(tmp_path: Path) -> None:
    fields = {"rope.freq_base_swa": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = open_checkpoint(str(GEMMA3.write(tmp_path / "a.gguf", fields))).config
    assert (config["rope_local_base_freq"], config["rope_scaling"]) == (5000.0, {"rope_type": "linear", "factor": 8.0})


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
YARN_CONFIG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("extra", "added"),
    [
        ({}, {}),
        ({"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}, {"beta_fast": 16.0, "beta_slow": 2.0}),
        ({"rope.scaling.yarn_attn_factor": 0.5}, {"attention_factor": 0.5 * (1 + 0.1 * math.log(4))}),
        ({"rope.scaling.attn_factor": 0.5}, {"attention_factor": 0.5 * (1 + 0.1 * math.log(4))}),
    ],
)
def test_yarn(tmp_path: Path, extra: dict[str, Any], added: dict[str, float]) -> None:
    for case in (QWEN2, QWEN3):
        got = open_checkpoint(str(case.write(tmp_path / "a.gguf", {**YARN, **extra}))).config["rope_scaling"]
        assert got == pytest.approx({**YARN_CONFIG, **added}) if added else got == YARN_CONFIG
    llama = {f"llama.{key}": value for key, value in {**YARN, **extra}.items()}
    assert open_checkpoint(str(write_gguf(tmp_path / "b.gguf", metadata=llama))).config["rope_scaling"] == pytest.approx(
        {**YARN_CONFIG, **added}
    )


def test_yarn_without_an_original_context_takes_the_context(tmp_path: Path) -> None:
    fields = {**YARN, "rope.scaling.original_context_length": None}
    config = open_checkpoint(str(QWEN2.write(tmp_path / "a.gguf", fields))).config
    assert config["rope_scaling"] == {**YARN_CONFIG, "original_max_position_embeddings": 128}


def long_factors(count: int = HALF // 2) -> dict[str, np.ndarray]:
    return {
        "rope_factors_long.weight": np.linspace(1, 9, count, dtype=np.float32),
        "rope_factors_short.weight": np.linspace(1, 2, count, dtype=np.float32),
    }


def test_longrope_as_transformers_computes_it(tmp_path: Path) -> None:
    usual = math.sqrt(1 + math.log(2) / math.log(64))  # context 128 from 64; microsoft/Phi-3's modeling_phi3.py
    config = dict(open_checkpoint(str(PHI3.write(tmp_path / "a.gguf", {"rope.scaling.attn_factor": usual}, long_factors()))).config)
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": pytest.approx(np.linspace(1, 9, HALF // 2)),
        "short_factor": pytest.approx(np.linspace(1, 2, HALF // 2)),
    }
    other = open_checkpoint(str(PHI3.write(tmp_path / "b.gguf", {"rope.scaling.attn_factor": 1.5}, long_factors()))).config
    assert other["rope_scaling"]["attention_factor"] == 1.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (theirs["rope_type"], theirs["original_max_position_embeddings"]) == ("longrope", 64)


def test_a_part_of_the_head_is_rotated(tmp_path: Path) -> None:
    factors = long_factors(3)
    config = open_checkpoint(str(PHI3.write(tmp_path / "a.gguf", {"rope.dimension_count": 6}, factors))).config
    assert config["partial_rotary_factor"] == 6 / HALF
    assert len(config["rope_scaling"]["long_factor"]) == 3
    assert open_checkpoint(str(PHI3.write(tmp_path / "b.gguf", {"attention.sliding_window": 0}))).config["sliding_window"] is None


@pytest.mark.parametrize(
    ("case", "fields", "tensors", "field"),
    [
        (PHI3, {}, {"rope_factors_long.weight": np.ones(HALF // 2, np.float32)}, "rope_factors_short.weight"),
        (PHI3, {}, long_factors(3), "rope_factors_long.weight"),
        (PHI3, {}, {**long_factors(), "rope_factors_short.weight": -np.ones(HALF // 2, np.float32)}, "rope_factors_short.weight"),
        (PHI3, {}, {**long_factors(), "rope_factors_short.weight": np.ones(2**15, np.float32)}, "rope_factors_short.weight"),
        (PHI3, {"rope.scaling.type": "longrope"}, {}, "rope_factors_long.weight"),
        (PHI3, {"rope.dimension_count": HALF + 2}, {}, "phi3.rope.dimension_count"),
        (GEMMA3, {"attention.sliding_window": None}, {}, "gemma3.attention.sliding_window"),
        (GEMMA2, {"attn_logit_softcapping": -1.0}, {}, "gemma2.attn_logit_softcapping"),
        (QWEN2, {}, {"blk.0.attn_output.bias": np.ones(32, np.float32)}, "blk.0.attn_output.bias"),
        (QWEN3, {"attention.key_length": 15, "attention.value_length": 15}, {}, "qwen3.attention.key_length"),
    ],
)
def test_what_makes_no_sense_is_named(
    tmp_path: Path, case: Case, fields: dict[str, Any], tensors: dict[str, np.ndarray], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(case.write(tmp_path / "a.gguf", fields, tensors)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("case", "fields", "words"),
    [
        (QWEN2, {"rope.scaling.type": "longrope"}, "qwen2.rope.scaling.type 'longrope' is not supported; supported: none, linear, yarn"),
        (GEMMA2, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "gemma2.rope.scaling.type"),
        (QWEN2, {**YARN, "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        (QWEN2, {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        (QWEN2, {"rope.scaling.attn_factor": 1.2}, "attn_factor"),
        (QWEN2, {"attention.sliding_window": 100}, "qwen2.attention.sliding_window"),
        (GEMMA3, {"attention.scale": 0.5}, "gemma3.attention.scale"),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path: Path, case: Case, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        open_checkpoint(str(case.write(tmp_path / "a.gguf", fields)))
    assert words in str(caught.value)


@pytest.mark.parametrize(("case", "layers"), [(GEMMA2, 46), (GEMMA3, 62)])
def test_the_largest_gemma_scales_queries_by_hidden_size_over_heads(tmp_path: Path, case: Case, layers: int) -> None:
    tensors = case.gguf_tensors(case.tensors())
    more = {
        name.replace("blk.0.", f"blk.{layer}."): tensor
        for name, tensor in tensors.items()
        if name.startswith("blk.0.")
        for layer in range(LAYERS, layers)
    }
    config = open_checkpoint(str(case.write(tmp_path / "a.gguf", {"block_count": layers}, more))).config
    assert config["query_pre_attn_scalar"] == HALF
