"""The option that names an implementation of attention: every one gives the same tokens, and what cannot run is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import AttentionImplementation
from jaxinfer.errors import ConfigError
from pallas_kernels import paged_attention
from pallas_kernels.common.dispatch import UnsupportedByKernel

SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 32,
    "num_kv_blocks": 8,
    "host_kv_bytes": 0,
    "show_progress": False,
}
PROMPTS = ("The capital of France is", "1, 2, 3")


def tokens(model: Path, cache: Path, implementation: str, prompts: tuple[str, ...] = PROMPTS, **options: Any) -> list[list[int]]:
    with LLM(model=str(model), attention_implementation=implementation, compile_cache_dir=cache, **{**SMALL, **options}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, show_progress=False)]


def test_the_option_names_what_there_is() -> None:
    assert set(get_args(AttentionImplementation)) == {"auto", *paged_attention.OPERATION.implementations}


def test_every_implementation_gives_the_same_tokens(tiny_llama: Path, compile_cache_dir: Path) -> None:
    expected = tokens(tiny_llama, compile_cache_dir, "auto")
    assert tokens(tiny_llama, compile_cache_dir, "xla") == expected
    assert tokens(tiny_llama, compile_cache_dir, "reference") == expected


def test_the_one_that_is_named_is_taken(tiny_llama: Path, compile_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other in its place: its refusal is an error that names the option, before anything is served."""

    def refuses(*arrays: Any, **options: Any) -> Any:
        raise UnsupportedByKernel("not on a Tuesday")

    monkeypatch.setitem(paged_attention.OPERATION.implementations, "xla", refuses)
    with pytest.raises(ConfigError, match="--attention-implementation xla does not run this model here: not on a Tuesday"):
        tokens(tiny_llama, compile_cache_dir, "xla", max_num_seqs=1)
    with pytest.raises(ConfigError, match="--attention-implementation must be one of auto, native, xla, reference, mosaic, got 'flash'"):
        tokens(tiny_llama, compile_cache_dir, "flash")
    with pytest.raises(ConfigError, match=r"--attention-implementation mosaic does not run this model here: .*float32"):
        tokens(tiny_llama, compile_cache_dir, "mosaic")
    with pytest.raises(ConfigError, match="interpreted on a CPU, where --tensor-parallel-size must be 1, got 2"):
        tokens(tiny_llama, compile_cache_dir, "mosaic", tensor_parallel_size=2)


@pytest.mark.kernels
@pytest.mark.timeout(600)
def test_smollm2_with_the_gpu_kernel_interpreted_gives_the_same_tokens(smollm2_path: Path, compile_cache_dir: Path) -> None:
    """A prefill and 7 decoding steps of 30 layers, all in the engine's own programs."""
    options = {"prompts": PROMPTS[:1], "max_num_seqs": 1, "dtype": "bfloat16"}
    expected = tokens(smollm2_path, compile_cache_dir, "auto", **options)
    assert tokens(smollm2_path, compile_cache_dir, "mosaic", **options) == expected
