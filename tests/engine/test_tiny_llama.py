"""A random 2-layer Llama through the whole engine against numpy float64, on one device and on two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import CheckpointError, ConfigError
from tests.parity.oracle import LlamaOracle, row_errors
from tests.tiny_llama import random_weights, write_tiny_llama

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "num_kv_blocks": 64, "show_progress": False}
PROMPTS = [[(i * 37 + k * 101) % 4000 + 60 for i in range(3 + (k * 29) % 70)] for k in range(8)]


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> LlamaOracle:
    import json

    config = json.loads((tiny_llama / "config.json").read_text())
    return LlamaOracle(random_weights(config, 0), config)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, compile_cache_dir: Path) -> LLM:
    return LLM(model=str(tiny_llama), compile_cache_dir=compile_cache_dir, **SMALL)


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, show_progress=False)]


@pytest.mark.parametrize("chunk_size", [None, 5, 16])
def test_logits_equal_the_oracle(llm: LLM, oracle: LlamaOracle, chunk_size: int | None) -> None:
    for prompt in PROMPTS[:4]:
        assert row_errors(llm.engine.logits_for(prompt, chunk_size), oracle.logits(prompt)).max() <= 1e-5


def test_greedy_tokens_equal_the_oracle(llm: LLM, oracle: LlamaOracle) -> None:
    for prompt, tokens in zip(PROMPTS, greedy(llm, PROMPTS), strict=True):
        logits = oracle.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        behind = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
        assert behind.max() <= 1e-4


def test_tensor_parallel_gives_the_same_tokens(llm: LLM, tiny_llama: Path, compile_cache_dir: Path) -> None:
    """Two devices: heads, MLP and vocabulary are split; two all-reduces a layer, one for the embedding, one gather of logits."""
    split = LLM(model=str(tiny_llama), tensor_parallel_size=2, compile_cache_dir=compile_cache_dir, **SMALL)
    assert greedy(split, PROMPTS) == greedy(llm, PROMPTS)
    runner: Any = split.engine.runner
    for program in runner._forward.values():
        collectives = re.findall(r"= [^=]*\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", program.as_text())
        assert sorted(collectives) == ["all-gather"] + ["all-reduce"] * (2 * 2 + 1)


def test_more_devices_than_kv_heads_give_the_same_tokens(llm: LLM, tiny_llama: Path, compile_cache_dir: Path) -> None:
    """Two KV heads on four devices: each lies on two, beside one of the two query heads that read it."""
    split = LLM(model=str(tiny_llama), tensor_parallel_size=4, compile_cache_dir=compile_cache_dir, **SMALL)
    assert greedy(split, PROMPTS) == greedy(llm, PROMPTS)
    runner: Any = split.engine.runner
    assert runner._kv[0].keys.shape[0] == 4


def test_int8_and_bfloat16_are_near(llm: LLM, tiny_llama: Path, compile_cache_dir: Path, oracle: LlamaOracle) -> None:
    """Quantized and rounded, but the same model: far nearer than a wrong layer would be."""
    for options, limit in (
        ({"quantization": "int8"}, 0.03),
        ({"dtype": "bfloat16"}, 0.05),
        ({"kv_cache_dtype": "fp8"}, 0.05),
    ):
        other = LLM(model=str(tiny_llama), compile_cache_dir=compile_cache_dir, **options, **SMALL)
        errors = row_errors(other.engine.logits_for(PROMPTS[3]), oracle.logits(PROMPTS[3]))
        assert 1e-4 < np.median(errors) <= limit, "either far off, or not what was asked for"


def test_what_does_not_fit_is_refused(tiny_llama: Path, smollm2_path: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"tensor_parallel_size": 3}, "does not divide"),
        ({"tensor_parallel_size": 64}, "found 8"),
        ({"max_model_len": 100_000}, "context of 512"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "must be at least --max-num-seqs"),
        ({"preemption": "swap", "host_kv_bytes": 0}, "needs host memory"),
        ({"no_such": 1}, "unknown option"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(model=str(tiny_llama), **{**SMALL, **options})
    broken = write_tiny_llama(tmp_path / "broken", tokenizer_from=smollm2_path, num_hidden_layers=2)
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(CheckpointError, match=r"model.layers.2.*missing"):
        LLM(model=str(broken), **SMALL)
    (broken / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 130'))
    with pytest.raises(CheckpointError, match=r"config\.json asks for"):
        LLM(model=str(broken), **SMALL)


def test_unknown_attributes_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    """Strict import: what would change the forward pass and is not implemented is an error that names it."""
    import json

    from jaxinfer.errors import UnsupportedModelError
    from jaxinfer.models import llama
    from jaxinfer.models.config import find

    config = json.loads((tiny_llama / "config.json").read_text())
    for change, words in (
        ({"sliding_window": 128}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            llama.Config.from_hf(config | change, "config.json")
    for name in ("gpt5", "../llama", "config", ""):
        with pytest.raises((UnsupportedModelError, CheckpointError), match="model_type"):
            find(config | {"model_type": name}, "config.json")
