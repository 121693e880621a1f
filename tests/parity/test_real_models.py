"""The optional models from their GGUF through the whole engine: the tokens that transformers gives (make_real_goldens.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.real_models import pulled
from tests.parity.golden_files import NUM_REAL_TOKENS, read_real_goldens
from tests.parity.greedy_parity import count_tied_prompts

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

MAX_TIED_PROMPTS = 1


def generate(llm: Any, prompts: list[list[int]], num_new_tokens: list[int]) -> list[list[int]]:
    from jaxinfer import SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in num_new_tokens]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, show_progress=False)]


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("name", ["gemma3-270m", "qwen2.5-coder-0.5b"])
def test_greedy_tokens_are_those_of_transformers(name: str, quantization: str, compile_cache_dir: Path) -> None:
    """Dequantized, and as the file stores them."""
    from jaxinfer import LLM

    goldens = read_real_goldens(name)
    assert len(goldens) == 16
    assert all(len(golden.token_ids) == NUM_REAL_TOKENS for golden in goldens)
    llm = LLM(
        model=str(pulled(name)),
        dtype="float32",
        quantization=quantization,
        max_model_len=512,
        max_num_seqs=16,
        compile_cache_dir=compile_cache_dir,
        show_progress=False,
    )
    for golden in goldens:
        assert llm.tokenizer.encode(golden.text) == golden.prompt_token_ids
    num_tied = count_tied_prompts(goldens, lambda prompts, counts: generate(llm, prompts, counts))
    assert num_tied <= MAX_TIED_PROMPTS
