"""Experts and latents beyond the goldens: stored as mxfp4, quantized, with a rounded cache; what their configurations refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoints.load import Storage
from jaxinfer.errors import CheckpointError, UnsupportedModelError
from jaxinfer.models.config import find
from jaxinfer.quant import weight as quant
from tests.models.case import load_case
from tests.models.cases.gpt_oss import BLOCK, MAGNITUDES, exponents
from tests.models.golden_engine import forward, make_engine, read_config, read_golden, read_tensors
from tests.parity.oracle import row_errors

EXPONENT_BIAS = 127


def mxfp4_encoded(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [X out in] that mxfp4 holds exactly, as gpt_oss stores them: uint8 [X out in/32 16] and exponents [X out in/32]."""
    blocks = matrices.astype(np.float64).reshape(*matrices.shape[:2], -1, BLOCK)
    powers = exponents(blocks)
    steps = blocks / np.exp2(powers)[..., None]
    codes = np.abs(np.abs(steps)[..., None] - MAGNITUDES).argmin(axis=-1)
    assert (MAGNITUDES[codes] == np.abs(steps)).all(), "the case rounds them to what can be stored"
    codes = (codes + 8 * (steps < 0)).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (powers + EXPONENT_BIAS).astype(np.uint8)


def with_mxfp4_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts' matrices [X in out] under the names, and as what, gpt_oss stores them."""
    stored = dict(tensors)
    for name in tensors:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = mxfp4_encoded(stored.pop(name).swapaxes(1, 2))
    return stored


@pytest.mark.goldens
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_gpt_oss_with_experts_in_mxfp4_is_the_same_model(num_devices: int) -> None:
    """Multiplied as they are stored. On two devices the inputs of `down` would cut a block of 32: it is read as floats there."""
    case = load_case("gpt_oss")
    golden = read_golden(case.folder)
    storage = Storage(keeps_packed=True)
    engine = make_engine(
        {**read_config(case.folder), "quantization_config": {"quant_method": "mxfp4"}},
        with_mxfp4_experts(read_tensors(case.folder)),
        max_model_len=case.max_model_len,
        num_devices=num_devices,
        storage=storage,
    )
    kinds = {str(leaf.dtype) for leaf in engine.runner._weights}
    assert "uint8" in kinds, "the experts must have stayed packed"
    for ids, logits in zip(golden.token_ids, golden.logits, strict=True):
        assert row_errors(engine.logits_for(ids[:-1]), logits).max() <= 1e-4


@pytest.mark.goldens
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_int8_experts_are_near(name: str) -> None:
    """A router that is quantized too, or one expert's scales with another's values, would be far off."""
    case = load_case(name)
    golden = read_golden(case.folder)
    sequences = [ids[:-1] for ids in golden.token_ids]
    storage = Storage(method=quant.method("int8"))
    logits = forward(read_config(case.folder), read_tensors(case.folder), sequences, max_model_len=case.max_model_len, storage=storage)
    errors = np.concatenate([row_errors(*pair) for pair in zip(logits, golden.logits, strict=True)])
    assert 1e-4 < np.median(errors) <= 0.05


@pytest.mark.goldens
def test_latents_in_int8_are_near() -> None:
    """One scale for a token's latent and rotated key together."""
    case = load_case("deepseek_v3")
    golden = read_golden(case.folder)
    engine = make_engine(read_config(case.folder), read_tensors(case.folder), max_model_len=case.max_model_len, kv_dtype="int8")
    errors = [row_errors(engine.logits_for(ids[:-1]), logits) for ids, logits in zip(golden.token_ids, golden.logits, strict=True)]
    assert 1e-4 < np.median(np.concatenate(errors)) <= 0.05


def test_a_latent_cache_is_small() -> None:
    """A token costs kv_lora_rank + qk_rope_head_dim numbers a layer, once, however many heads there are."""
    case = load_case("deepseek_v3")
    config = read(case.config)
    (group,) = find(case.config, "config.json").kv_groups(config, "bfloat16")
    assert (group.kind, group.layers) == ("latent", (0, 1))
    assert [(tensor.name, tensor.num_heads, tensor.head_dim, tensor.dtype) for tensor in group.tensors] == [("keys", 1, 48, "bfloat16")]


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    """DeepSeek-V3's files have them after the last layer; what else is not used stays an error."""
    case = load_case("deepseek_v3")
    tensors = read_tensors(case.folder)
    sequences = [[1, 2, 3]]
    plain = forward(case.config, tensors, sequences, max_model_len=64)
    extra = {"model.layers.2.eh_proj.weight": np.ones((32, 64), np.float16)}
    np.testing.assert_array_equal(forward(case.config, tensors | extra, sequences, max_model_len=64)[0], plain[0])
    for config, name in (
        ({**case.config, "num_nextn_predict_layers": 0}, "model.layers.2.eh_proj.weight"),
        (case.config, "model.layers.3.eh_proj.weight"),
        (case.config, "model.layers.20.eh_proj.weight"),
    ):
        with pytest.raises(UnsupportedModelError, match="not used by this model"):
            forward(config, tensors | {name: extra["model.layers.2.eh_proj.weight"]}, sequences, max_model_len=64)


def read(config: Mapping[str, Any]) -> Any:
    return find(config, "config.json").Config.from_hf(config, "config.json")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, r"num_experts_per_tok: must be at most num_local_experts \(5\), got 6"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts: must be from 1"),
        ("qwen3_moe", {"num_experts": "many"}, "num_experts: must be int"),
        ("deepseek_v2", {"n_group": 3}, "n_group: must divide 8 experts"),
        ("deepseek_v2", {"topk_group": 5}, "topk_group: 5 of 4 groups"),
        ("deepseek_v2", {"topk_group": 1}, "topk_group: 1 of 4 groups"),
        ("deepseek_v3", {"n_group": 8}, "n_group: must divide 8 experts into groups of 2"),
        ("deepseek_v3", {"num_nextn_predict_layers": 2**40}, "num_nextn_predict_layers: must be from 0"),
    ],
)
def test_counts_that_make_no_sense_are_refused(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read({**load_case(name).config, **change})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 5}, "shared_expert_intermediate_size = 5"),
    ],
)
def test_what_is_not_implemented_is_named(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read({**load_case(name).config, **change})


def test_which_layers_are_dense() -> None:
    qwen3, deepseek = load_case("qwen3_moe").config, load_case("deepseek_v3").config
    assert read(qwen3).dense_layers == {1}
    assert read({**qwen3, "decoder_sparse_step": 3, "mlp_only_layers": []}).dense_layers == {0, 1}
    assert read({**deepseek, "num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}).dense_layers == {0, 1, 3, 5}
    assert read({**qwen3, "num_experts": None, "num_local_experts": 8}).num_experts == 8
