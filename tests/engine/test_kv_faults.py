"""What goes wrong with KV memory: it becomes slower or ends with a clear message, and never gives a wrong token.

Every answer here is compared with the oracle of the lookup model, by `tiered_engine.finish`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.config import CacheConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import ConfigError, KVCorruptionError, RequestError
from jaxinfer.request import FinishReason
from tests.engine.tiered_engine import (
    GREEDY,
    add,
    answer,
    assert_idle,
    end,
    finish,
    make_base,
    settle,
    step,
    tiered_engine,
)

PROMPTS = [[(k * 7 + number * 41) % 250 for k in range(45)] for number in range(6)]


@pytest.fixture(scope="module")
def base() -> Engine:
    return make_base()


# ---- host memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_a_full_host_tier_means_recomputing(base: Engine, ahead: str) -> None:
    """All its slots are held by sequences that were swapped out."""
    engine = tiered_engine(base, num_blocks=20, host_slots=8, preemption="swap", async_scheduling=ahead)
    outputs = [add(engine, f"r{number}", PROMPTS[number][:20], GREEDY.replace(max_tokens=40)) for number in range(6)]
    host, num_held = engine.scheduler.tiers.host[0], 0
    while not all(output.is_finished for output in outputs):
        step(engine, *outputs)
        num_held = max(num_held, host.num_held)
    finish(engine, *outputs)
    counters = engine.scheduler.counters
    assert counters.num_preemptions_swap > 0 and counters.num_preemptions_recompute > 0
    assert host.num_blocks - num_held < 6, "another victim would have found room"
    end(engine)


def test_a_host_tier_of_one_slot(base: Engine) -> None:
    engine = tiered_engine(base, num_blocks=20, host_slots=1, preemption="swap")
    for _ in range(2):
        for prompt in PROMPTS:
            answer(engine, prompt)
    end(engine)


def test_more_host_memory_than_there_is_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--host-kv-bytes is {2**49}, but only \d+ bytes of memory are available") as raised:
        LLM(model=str(tiny_llama), host_kv_bytes=2**49, show_progress=False)
    assert raised.value.option == "--host-kv-bytes"


def test_too_little_host_memory_for_a_block_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host-kv-bytes must be at least \d+: a block of every KV group, got 5$"):
        LLM(model=str(tiny_llama), host_kv_bytes=5, show_progress=False)


@pytest.mark.parametrize("source", ["cached", "swapped", "spilled"])
def test_a_flipped_bit_in_host_memory_ends_the_engine_before_a_token(base: Engine, source: str, tmp_path: Path) -> None:
    """Found with --kv-checksums on: memory that lost one bit is trusted with nothing else, so that the fault is not one request's."""
    engine = tiered_engine(base, num_blocks=20, host_slots=40, checks_crc=True, preemption="swap", folder=tmp_path)
    mover = engine.runner.mover
    assert mover is not None
    if source == "swapped":
        outputs = [add(engine, f"r{number}", PROMPTS[number][:20], GREEDY.replace(max_tokens=40)) for number in range(2)]
        while not engine.scheduler.num_preemptions:
            step(engine, *outputs)
    else:
        outputs = [answer(engine, prompt) for prompt in PROMPTS[:3]]
        outputs = [add(engine, "again", PROMPTS[0])]
    assert mover._host
    for place, stored in mover._host.items():
        mover._host[place] = replace(stored, block=jax.tree.map(_with_a_flipped_bit, stored.block))
    if source == "spilled":
        engine.abort(outputs[0].request_id)
        with pytest.raises(KVCorruptionError, match=r"CRC [0-9a-f]{8} and came back with [0-9a-f]{8} on its way to disk"):
            engine.close()
        return
    with pytest.raises(KVCorruptionError, match=r"CRC [0-9a-f]{8} and came back with [0-9a-f]{8} on the device: the memory or a copy is"):
        finish(engine, *outputs)


def _with_a_flipped_bit(array: jax.Array) -> jax.Array:
    content = np.array(array)
    content.reshape(-1).view(np.uint8)[5] ^= 4
    return jax.device_put(content, array.sharding)


# ---- options -------------------------------------------------------------------------------------------------------


def test_a_disk_path_that_is_a_file_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match=rf"--disk-kv-path {path} cannot be made a folder: File exists") as raised:
        LLM(model=str(tiny_llama), disk_kv_path=path, show_progress=False)
    assert raised.value.option == "--disk-kv-path"


def test_a_disk_without_host_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--disk-kv-path takes what leaves host memory, got --host-kv-bytes 0"):
        CacheConfig(disk_kv_path=tmp_path, host_kv_bytes=0)


# ---- tiny pools ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", ["on", "off"])
@pytest.mark.parametrize("options", [{}, {"host_slots": 1}, {"host_slots": 3, "preemption": "swap"}, {"prefix_caching": False}], ids=str)
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_pool_of_one_block_and_of_two(base: Engine, num_blocks: int, options: dict[str, Any], ahead: str) -> None:
    """Everybody gets what the pool holds, one after the other; what can never run is refused and says why."""
    engine = tiered_engine(base, num_blocks=num_blocks, async_scheduling=ahead, **options)
    most = 4 * num_blocks
    for _ in range(2):
        outputs = [
            add(engine, f"r{length}", range(10 * length, 11 * length), GREEDY.replace(n=1 + length % 3, max_tokens=20))
            for length in range(1, most)
        ]
        finish(engine, *outputs)
        for length, output in enumerate(outputs, 1):
            assert [len(one.token_ids) for one in output.outputs] == [most - length] * (1 + length % 3)
            assert {one.finish_reason for one in output.outputs} == {FinishReason.LENGTH}
    with pytest.raises(RequestError, match=rf"the prompt has {most} tokens and at most {most - 1} are allowed: the KV pool holds {most}"):
        add(engine, "too long", range(most))
    settle(engine)
    assert_idle(engine)
