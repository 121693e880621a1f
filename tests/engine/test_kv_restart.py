"""KV blocks on disk outlive the engine that computed them, and only serve one that would have computed the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.request import RequestOutput
from tests.engine.test_tiny_llama import SMALL
from tests.tiny_llama import write_tiny_llama

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BLOCK_SIZE = 16
PROMPT = "You are a careful assistant. Name your sources, and say so when you do not know. " * 10


@pytest.fixture(scope="module")
def other_weights(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny_llama", tokenizer_from=smollm2_path, seed=1)


@pytest.fixture(scope="module")
def other_rope(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny_llama", tokenizer_from=smollm2_path, rope_theta=20000.0)


def ask(compile_cache_dir: Path, model: Path, folder: Path | None, **options: Any) -> RequestOutput:
    """What a new engine answers; it is closed afterwards."""
    settings: dict[str, Any] = SMALL | options
    with LLM(
        model=str(model),
        disk_kv_path=folder,
        host_kv_bytes=2**22,
        compile_cache_dir=compile_cache_dir,
        **settings,
    ) as llm:
        tiers = llm.engine.scheduler.tiers
        tiers.limits = replace(tiers.limits, min_fetch_tokens=0)  # Whatever pays on this machine: here it is to happen.
        output = llm.generate(PROMPT, PARAMS, show_progress=False)[0]
        snapshot = llm.engine.snapshot()
        assert snapshot.num_hit_tokens_disk == output.num_cached_tokens
        assert snapshot.num_disk_faults == 0
        return output


def test_a_long_prompt_is_found_after_a_restart(tiny_llama: Path, compile_cache_dir: Path, tmp_path: Path) -> None:
    first = ask(compile_cache_dir, tiny_llama, tmp_path)
    second = ask(compile_cache_dir, tiny_llama, tmp_path)
    num_blocks = (len(first.prompt_token_ids) - 1) // BLOCK_SIZE
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_blocks * BLOCK_SIZE)
    assert num_blocks >= 8
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.fixture(scope="module")
def filled(tiny_llama: Path, compile_cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the blocks of one engine."""
    folder = tmp_path_factory.mktemp("kv")
    ask(compile_cache_dir, tiny_llama, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("model, options", [
    ("other_weights", {}),
    ("other_rope", {}),
    ("tiny_llama", {"kv_cache_dtype": "bfloat16"}),
    ("tiny_llama", {"kv_cache_dtype": "int8"}),
    ("tiny_llama", {"block_size": 32}),
    ("tiny_llama", {"quantization": "int8"}),
], ids=str)  # fmt: skip
def test_what_another_engine_left_is_not_used(
    model: str, options: dict[str, Any], filled: Path, compile_cache_dir: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    undisturbed = ask(compile_cache_dir, path, None, **options)
    assert list(filled.iterdir())
    output = ask(compile_cache_dir, path, filled, **options)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == undisturbed.outputs[0].token_ids
