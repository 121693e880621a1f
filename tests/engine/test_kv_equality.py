"""Where KV comes from never changes an answer: cached, chunked, swapped, recomputed, from host memory, from disk, ahead or not.

Every setting must give the tokens of a run with all of it off, and with `--batch-invariant on` every row of logits to the bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.kv.tiers import KVCounters

pytestmark = [pytest.mark.kv_equality, pytest.mark.timeout(1800)]

NEW_TOKENS = 26
MAX_LEN = 256
BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SYSTEM = "You are a careful assistant. Answer in one sentence, name your sources, and say so when you do not know. "
SMALL_POOL = 40
"""Blocks for three of the longest sequences, while a dozen want to run."""


def make_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Texts that share beginnings of 0 to 9 blocks, in part ending exactly at a block's end."""
    common = llm.tokenizer.encode(SYSTEM * 12)
    prompts = []
    for index in range(count):
        shared = common[: (index * 7) % 10 * BLOCK_SIZE]
        own = llm.tokenizer.encode(f"Question {index}: what is {index * 31 % 97} times {index}?" * 3)[: 1 + index * 13 % 45]
        prompts.append([*shared, *own])
    return prompts


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options of an engine, how often the prompts are asked, and what proves that the thing happened."""

    options: dict[str, Any]
    proof: Callable[[KVCounters], int]
    num_rounds: int = 1
    num_host_slots: int = 0
    has_disk: bool = False


OFF: dict[str, Any] = {
    "prefix_caching": "off",
    "async_scheduling": "off",
    "preemption": "recompute",
    "num_kv_blocks": 512,
    "max_num_batched_tokens": 256,
}
SMALL = {"num_kv_blocks": SMALL_POOL}
CACHED = {"prefix_caching": "on"}
SETTINGS: dict[str, Setting] = {
    "prefix cache": Setting(options=CACHED, proof=lambda s: s.num_hit_tokens_device, num_rounds=2),
    "chunked": Setting(options={"max_num_batched_tokens": 16}, proof=lambda s: 1),
    "recompute": Setting(options=SMALL, proof=lambda s: s.num_preemptions_recompute),
    "swap": Setting(options=SMALL | {"preemption": "swap"}, proof=lambda s: s.num_preemptions_swap, num_host_slots=400),
    "host tier": Setting(options=SMALL | CACHED, proof=lambda s: s.num_hit_tokens_host, num_rounds=2, num_host_slots=2000),
    "disk tier": Setting(options=SMALL | CACHED, proof=lambda s: s.num_hit_tokens_disk, num_rounds=2, num_host_slots=24, has_disk=True),
    "asynchronous": Setting(options={"async_scheduling": "on"}, proof=lambda s: 1),
    "everything": Setting(
        options=SMALL | CACHED | {"async_scheduling": "on", "preemption": "swap", "max_num_batched_tokens": 64},
        proof=lambda s: s.num_preemptions_swap * (s.num_hit_tokens_host + s.num_hit_tokens_disk),
        num_rounds=2,
        num_host_slots=60,
        has_disk=True,
    ),
}


class Recorder:
    """Tokens, and a digest of every row of logits that a token was sampled from."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.bits: dict[tuple[str, int], int] = {}
        self._forward = llm.engine.runner.forward
        llm.engine.runner.forward = self._record  # type: ignore[method-assign]

    def _record(self, output: Any, rows: Any) -> Any:
        logits = self._forward(output, rows)
        on_host = np.asarray(logits)
        for index, row in enumerate(rows):
            request_id = output.scheduled[row.row].request_id
            digest = zlib.crc32(on_host[index].tobytes())
            assert self.bits.setdefault((request_id, row.position), digest) == digest, "a position computed twice has other bits"
        return logits

    def run(self, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """For each prompt its tokens and the digests of their logits."""
        self.bits.clear()
        outputs = self.llm.generate(prompts, PARAMS, show_progress=False)
        self.llm.engine.scheduler.check()
        return [
            (output.outputs[0].token_ids, [self.bits[output.request_id, len(prompt) - 1 + index] for index in range(NEW_TOKENS)])
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


def make(model: Path, kv_dtype: str, compile_cache_dir: Path, options: dict[str, Any]) -> Recorder:
    """An engine, everything off but what `options` turn on."""
    llm = LLM(
        model=str(model),
        dtype="float32",
        kv_cache_dtype=kv_dtype,
        batch_invariant="on",
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=12,
        compile_cache_dir=compile_cache_dir,
        show_progress=False,
        **OFF | {"host_kv_bytes": 0} | options,
    )
    tiers = llm.engine.scheduler.tiers
    # Whatever pays on this machine: here it is to happen.
    tiers.limits = replace(tiers.limits, min_swap_tokens=0, min_fetch_tokens=0)
    return Recorder(llm)


@dataclass(frozen=True)
class Baseline:
    """What a model answers with everything off."""

    model: Path
    kv_dtype: str
    prompts: list[list[int]]
    answers: list[tuple[list[int], list[int]]]
    block_bytes: int


@pytest.fixture(scope="module", params=[(model, dtype) for model in ("tiny", "smollm2") for dtype in ("float32", "bfloat16", "int8")])
def baseline(request: pytest.FixtureRequest, tiny_llama: Path, smollm2_path: Path, compile_cache_dir: Path) -> Iterator[Baseline]:
    name, kv_dtype = request.param
    model = tiny_llama if name == "tiny" else smollm2_path
    recorder = make(model, kv_dtype, compile_cache_dir, {})
    prompts = make_prompts(recorder.llm, 300 if name == "tiny" else 40)
    (block_bytes,) = recorder.llm.engine.scheduler.tiers.limits.block_bytes
    answers = recorder.run(prompts)
    assert len({tuple(tokens) for tokens, _ in answers}) > len(prompts) // 2, "the answers hardly differ: the comparison is worth little"
    yield Baseline(model, kv_dtype, prompts, answers, block_bytes)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_same_tokens_and_bits(name: str, baseline: Baseline, compile_cache_dir: Path, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    options = setting.options | {"host_kv_bytes": setting.num_host_slots * baseline.block_bytes}
    if setting.has_disk:
        options |= {"disk_kv_path": tmp_path / "kv", "disk_kv_bytes": 2**30}
    recorder = make(baseline.model, baseline.kv_dtype, compile_cache_dir, options)
    for _ in range(setting.num_rounds):
        answers = recorder.run(baseline.prompts)
        different = [index for index, (got, wanted) in enumerate(zip(answers, baseline.answers, strict=True)) if got[0] != wanted[0]]
        assert not different, f"the tokens of prompts {different} differ"
        different = [index for index, (got, wanted) in enumerate(zip(answers, baseline.answers, strict=True)) if got[1] != wanted[1]]
        assert not different, f"the logits of prompts {different} have other bits"
    snapshot = recorder.llm.engine.snapshot()
    assert setting.proof(recorder.llm.engine.scheduler.counters) > 0, "it never happened"
    assert snapshot.num_recompiles == 0
    recorder.llm.close()
