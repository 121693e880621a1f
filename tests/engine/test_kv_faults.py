"""What goes wrong with KV memory: it becomes slower or ends with a clear message, and never gives a wrong token.

Every answer here is compared with the oracle of the lookup model, by `tiered_engine.finish`.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
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
    CANARY,
    GREEDY,
    add,
    answer,
    assert_idle,
    finish,
    make_base,
    settle,
    step,
    tiered_engine,
)

PROMPTS = [[(k * 7 + number * 41) % 250 for k in range(45)] for number in range(6)]
LONG = PROMPTS[0]
"""45 tokens: eleven full blocks."""


@pytest.fixture(scope="module")
def base() -> Engine:
    return make_base()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def wait_for_disk(engine: Engine) -> None:
    """Until everything that is queued was done; the next step hears of it."""
    assert engine.runner.mover is not None and engine.runner.mover._disk is not None
    engine.runner.mover._disk._worker.submit(int).result(60)


def end(engine: Engine) -> None:
    """After all of it, service is what it was."""
    answer(engine, CANARY)
    settle(engine)
    assert_idle(engine)
    engine.close()


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


# ---- disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_nothing(base: Engine, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Full, or read-only: one message, and what is on it already is still used."""
    first = tiered_engine(base, folder=tmp_path, host_slots=12)
    answer(first, LONG)
    first.close()
    num_files = len(list(tmp_path.iterdir()))
    assert num_files >= 11
    engine = tiered_engine(base, num_blocks=20, folder=tmp_path, host_slots=12)
    assert engine.runner.mover is not None and engine.runner.mover._disk is not None

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    engine.runner.mover._disk._write_file = refuse  # type: ignore[method-assign]
    assert answer(engine, LONG).num_cached_tokens == 44
    for _ in range(2):
        for prompt in PROMPTS:
            answer(engine, prompt)
            wait_for_disk(engine)
    (message,) = warnings_of(caplog)
    assert str(tmp_path) in message and os.strerror(code) in message and errno.errorcode[code] in message
    assert engine.snapshot().num_disk_faults > 0
    end(engine)
    assert len(warnings_of(caplog)) == 1
    assert len(list(tmp_path.iterdir())) == num_files, "a leftover, or a block that was still good is gone"


def test_a_folder_that_is_removed(base: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "kv"
    engine = tiered_engine(base, num_blocks=20, folder=folder, host_slots=12)
    for _ in range(2):
        for prompt in PROMPTS:
            answer(engine, prompt)
    wait_for_disk(engine)
    assert list(folder.iterdir()) and engine.scheduler.tiers.disk
    shutil.rmtree(folder)
    for _ in range(2):
        for prompt in PROMPTS:
            answer(engine, prompt)
            wait_for_disk(engine)
    assert engine.snapshot().num_disk_faults > 0
    end(engine)
    (message,) = warnings_of(caplog)
    assert str(folder) in message and "No such file or directory" in message
    assert not folder.exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def another_block(path: Path) -> None:
    """A whole and valid file, of another prefix."""
    path.write_bytes(next(other for other in path.parent.iterdir() if other.name != path.name).read_bytes())


def remove(path: Path) -> None:
    path.unlink()


def keys_of(engine: Engine) -> list[bytes]:
    """The keys of the eleven full blocks of the long prompt, by this engine's identity."""
    index = engine.scheduler.tiers.index
    assert index is not None
    keys: list[Any] = []
    index.extend_keys(keys, index.acquire_root(), LONG, 11)
    return [key for key, _ in keys]


def file_name(key: bytes) -> str:
    """Of a block on disk."""
    return f"{key.hex()}-0.safetensors"


@pytest.mark.parametrize("damage", [flip, cut_off, another_block, remove])
@pytest.mark.parametrize("has_company", [True, False])
def test_a_damaged_block(
    base: Engine, damage: Callable[[Path], None], has_company: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands before it is used, the rest is computed again, and the next time all of it is found."""
    first = tiered_engine(base, folder=tmp_path, host_slots=48)
    answer(first, LONG)
    first.close()
    keys = keys_of(first)
    engine = tiered_engine(base, folder=tmp_path, host_slots=48)
    damage(tmp_path / file_name(keys[5]))
    others = [add(engine, "other", CANARY, GREEDY.replace(max_tokens=30)), add(engine, "same", LONG)] if has_company else []
    output = add(engine, "one", LONG)
    finish(engine, output, *others)
    assert output.num_cached_tokens == 20
    assert engine.snapshot().num_disk_faults >= 1
    messages = warnings_of(caplog)
    if damage is remove:
        assert not messages, "another process may have made room"
    else:
        assert len(messages) == 1 and keys[5].hex() in messages[0] and "computed again" in messages[0]
    end(engine)
    third = tiered_engine(base, folder=tmp_path, host_slots=48)
    assert answer(third, LONG).num_cached_tokens == 44
    end(third)
    assert warnings_of(caplog) == messages


def test_another_models_blocks_are_never_used(base: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither under their own names nor under ours."""
    first = tiered_engine(base, folder=tmp_path, host_slots=48, identity=b"another model")
    answer(first, LONG)
    first.close()
    num_theirs = len(list(tmp_path.iterdir()))
    engine = tiered_engine(base, folder=tmp_path, host_slots=48)
    assert answer(engine, LONG).num_cached_tokens == 0
    end(engine)
    assert not warnings_of(caplog) and len(list(tmp_path.iterdir())) > num_theirs
    for ours, theirs in zip(keys_of(engine), keys_of(first), strict=True):
        shutil.copyfile(tmp_path / file_name(theirs), tmp_path / file_name(ours))
    engine = tiered_engine(base, folder=tmp_path, host_slots=48)
    assert answer(engine, LONG).num_cached_tokens == 0
    end(engine)
    (message,) = warnings_of(caplog)
    assert "of another model" in message


def test_blocks_survive_a_restart(base: Engine, tmp_path: Path) -> None:
    """Also those that nobody ever evicted: they are written when the engine is closed."""
    first = tiered_engine(base, folder=tmp_path, host_slots=48)
    answer(first, LONG)
    assert not list(tmp_path.iterdir())
    first.close()
    second = tiered_engine(base, folder=tmp_path, host_slots=48)
    assert answer(second, LONG).num_cached_tokens == 44
    assert second.snapshot().num_hit_tokens_disk == 44
    assert add_salted(second).num_cached_tokens == 0
    end(second)


def add_salted(engine: Engine) -> Any:
    """The same prompt of another tenant."""
    output = add(engine, "salted", LONG, cache_salt="tenant")
    finish(engine, output)
    return output


def test_a_disk_smaller_than_what_is_cached(base: Engine, tmp_path: Path) -> None:
    engine = tiered_engine(base, num_blocks=20, folder=tmp_path, host_slots=4)
    disk = engine.scheduler.tiers.disk
    assert disk is not None
    disk.max_bytes = 6 * engine.scheduler.tiers.limits.block_bytes[0]
    for _ in range(2):
        for prompt in PROMPTS:
            answer(engine, prompt)
            assert disk.used_bytes <= disk.max_bytes
    end(engine)
    assert len(list(tmp_path.iterdir())) <= 6


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
