"""What goes wrong with KV blocks on disk: service becomes slower, says so once, and never gives a wrong token.

Every answer here is compared with the oracle of the lookup model, by `tiered_engine.finish`.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.engine import Engine
from jaxinfer.request import RequestOutput
from tests.engine.tiered_engine import BLOCK_BYTES, CANARY, GREEDY, add, answer, end, finish, make_base, tiered_engine, wait_for_disk

PROMPTS = [[(k * 7 + number * 41) % 250 for k in range(45)] for number in range(6)]
LONG = PROMPTS[0]
"""45 tokens: eleven full blocks."""


@pytest.fixture(scope="module")
def base() -> Engine:
    return make_base()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


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


def test_a_disk_that_is_too_slow_loses_blocks_and_is_used_on(base: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = tiered_engine(base, num_blocks=20, folder=tmp_path, host_slots=12)
    assert engine.runner.mover is not None and engine.runner.mover._disk is not None
    disk, released = engine.runner.mover._disk, threading.Event()
    disk._max_queued_bytes = 3 * BLOCK_BYTES
    disk._worker.submit(released.wait, 60)
    for prompt in PROMPTS:
        answer(engine, prompt)
    assert engine.snapshot().num_disk_faults > 0 and not list(tmp_path.iterdir())
    released.set()
    wait_for_disk(engine)
    assert 3 <= len(list(tmp_path.iterdir())) <= 4
    for prompt in PROMPTS:
        answer(engine, prompt)
    end(engine)
    assert len(list(tmp_path.iterdir())) > 4
    (message,) = warnings_of(caplog)
    assert f"KV blocks leave host memory faster than {tmp_path} takes them" in message


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
    if has_company:
        assert output.num_cached_tokens >= 20, "the other may have computed more of it by then"
    else:
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


def test_a_fetch_from_host_memory_and_a_damaged_disk(base: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The host slots that it held are given back with the blocks, and what they have is used."""
    first = tiered_engine(base, folder=tmp_path, host_slots=48)
    answer(first, LONG)
    first.close()
    engine = tiered_engine(base, num_blocks=20, folder=tmp_path, host_slots=48)
    answer(engine, LONG[:21], max_tokens=1)
    answer(engine, range(100, 175), max_tokens=1)
    assert engine.snapshot().num_hit_tokens_disk == 20
    flip(tmp_path / file_name(keys_of(engine)[8]))
    assert answer(engine, LONG).num_cached_tokens == 32
    assert engine.snapshot().num_hit_tokens_host > 0 and len(warnings_of(caplog)) == 1
    end(engine)


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


def add_salted(engine: Engine) -> RequestOutput:
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
