"""The same request in any company: alone, batched, chunked, preempted; to the bit with batch_invariant on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams

pytestmark = [pytest.mark.invariance, pytest.mark.timeout(1500)]

NUM_PROMPTS = 48
NEW_TOKENS = 16
PROMPTS = [[(i * 13 + k * 101) % 4000 + 60 for i in range(3 + (k * 29) % 198)] for k in range(NUM_PROMPTS)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 512, 24 at once": {"max_num_seqs": 24, "max_num_batched_tokens": 512},
    "chunks of 16": {"max_num_seqs": 16, "max_num_batched_tokens": 16},
    "chunks of 64, small pool": {"max_num_seqs": 24, "max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 120},
}


class Recorder:
    """Tokens, and a digest of the logits of every sampled position, by prompt."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.bits: dict[tuple[str, int], str] = {}
        self._forward = llm.engine.runner.forward
        llm.engine.runner.forward = self._record  # type: ignore[method-assign]

    def _record(self, output: Any, rows: Any) -> Any:
        logits = self._forward(output, rows)
        on_host = np.asarray(logits)
        for index, row in enumerate(rows):
            request = output.scheduled[row.row]
            digest = hashlib.sha256(on_host[index].tobytes()).hexdigest()
            # A preempted request computes its last position twice at most, and must give the same bits.
            assert self.bits.setdefault((request.request_id, row.position), digest) == digest
        return logits

    def run(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[str]]]:
        self.bits.clear()
        outputs = self.llm.generate(prompts, PARAMS, show_progress=False)
        bits = [
            [self.bits[output.request_id, len(prompt) - 1 + index] for index in range(NEW_TOKENS)]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        return [output.outputs[0].token_ids for output in outputs], bits


@pytest.fixture(scope="module", params=["none", "auto", "int8"])
def alone(request: pytest.FixtureRequest, smollm2_path: Path, compile_cache_dir: Path) -> Iterator[tuple[str, Recorder, list, list]]:
    """Every prompt by itself."""
    recorder = make(request.param, smollm2_path, compile_cache_dir, **SETTINGS["chunks of 512, 24 at once"])
    tokens, bits = [], []
    for prompt in PROMPTS:
        (one,), (its_bits,) = recorder.run([prompt])
        tokens.append(one)
        bits.append(its_bits)
    yield request.param, recorder, tokens, bits


def make(quantization: str, model: Path, compile_cache_dir: Path, **options: Any) -> Recorder:
    llm = LLM(
        model=str(model),
        dtype="float32",
        quantization=quantization,
        batch_invariant="on",
        max_model_len=256,
        compile_cache_dir=compile_cache_dir,
        show_progress=False,
        **{"num_kv_blocks": 512} | options,
    )
    return Recorder(llm)


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_same_tokens_and_bits(setting: str, alone: tuple[str, Recorder, list, list], smollm2_path: Path, compile_cache_dir: Path) -> None:
    quantization, recorder, tokens, bits = alone
    if SETTINGS[setting] is not SETTINGS["chunks of 512, 24 at once"]:
        recorder = make(quantization, smollm2_path, compile_cache_dir, **SETTINGS[setting])
    got_tokens, got_bits = recorder.run(PROMPTS)
    assert got_tokens == tokens
    different = [index for index in range(NUM_PROMPTS) if got_bits[index] != bits[index]]
    assert not different, f"the logits of prompts {different} have other bits"
    snapshot = recorder.llm.engine.snapshot()
    assert (snapshot.num_preemptions > 0) == ("small pool" in setting)
    assert snapshot.num_recompiles == 0
