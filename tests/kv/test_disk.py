from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from jaxinfer.errors import ConfigError
from jaxinfer.kv import disk as disk_module
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.messages import DiskEntry

ENTRY = DiskEntry(bytes(range(32)), 1, tuple(range(100, 132)), b"salt, int8")
MIB = 2**20


def block(seed: int = 0, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tensors = {name: np.frombuffer(rng.bytes(3 * 2 * 4 * 8 * kind.itemsize), kind).reshape(3, 2, 4, 8) for name in ("keys", "values")}
    if kind.itemsize == 1:
        tensors |= {name: rng.random((3, 2, 4), np.float32) for name in ("key_scales", "value_scales")}
    return tensors


def layout(tensors: dict[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


LAYOUT = layout(block())


def same(a: dict[str, np.ndarray] | None, b: dict[str, np.ndarray]) -> bool:
    return a is not None and layout(a) == layout(b) and all(a[name].tobytes() == b[name].tobytes() for name in b)


@pytest.fixture
def disk(tmp_path):
    blocks = DiskBlocks(tmp_path / "kv", MIB)
    yield blocks
    blocks.close()


def read(disk: DiskBlocks, entry: DiskEntry = ENTRY, shapes=LAYOUT) -> dict[str, np.ndarray] | None:
    return disk.read(entry, shapes).result(20)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_block_survives_a_restart_bit_for_bit(tmp_path, dtype):
    first, written = DiskBlocks(tmp_path / "a" / "kv", MIB), block(1, dtype)
    first.write(ENTRY, written)
    first.close()
    first.close()
    second = DiskBlocks(tmp_path / "a" / "kv", MIB)
    [(key, group, num_bytes)] = second.scan()
    assert (key, group) == (ENTRY.key, ENTRY.group)
    assert num_bytes == first.path(ENTRY).stat().st_size
    assert same(read(second, ENTRY, layout(written)), written)
    assert second.lost_entries() == []
    second.close()


def test_the_file_is_plain_safetensors_and_private(disk):
    disk.write(ENTRY, block())
    assert read(disk) is not None
    with safe_open(disk.path(ENTRY), "np") as file:
        about = json.loads(file.metadata()["kv_block"])
        assert tuple(file.get_tensor("token_ids")) == ENTRY.token_ids
    assert bytes.fromhex(about["namespace"]) == ENTRY.namespace
    assert disk.path(ENTRY).stat().st_mode & 0o077 == 0
    assert disk.folder.stat().st_mode & 0o077 == 0


def test_what_is_queued_happens_in_order(disk):
    results = []
    for seed in range(20):
        disk.write(ENTRY, block(seed))
        results.append(disk.read(ENTRY, LAYOUT))
        disk.delete(ENTRY)
        results.append(disk.read(ENTRY, LAYOUT))
    for seed in range(20):
        assert same(results[2 * seed].result(20), block(seed))
        assert results[2 * seed + 1].result(20) is None


def test_a_hundred_flipped_bytes_are_found(disk, caplog):
    rng = random.Random(5)
    disk.write(ENTRY, block())
    assert read(disk) is not None
    good = disk.path(ENTRY).read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little")
    places = [rng.randrange(len(good)) for _ in range(100)] + [rng.randrange(header_end) for _ in range(100)] + list(range(8))
    spaces = [place for place in range(header_end) if good[place : place + 1] == b" "]
    for place in places + spaces:
        bad = bytearray(good)
        bad[place] ^= 0x29 if place in spaces else rng.randrange(1, 256)  # a space becomes a tab, which JSON takes as well
        disk.path(ENTRY).write_bytes(bad)
        assert read(disk) is None, f"byte {place} of {len(good)}"
        assert not disk.path(ENTRY).exists()
    assert spaces
    assert 1 <= len(warnings_of(caplog)) <= 6  # once per kind
    assert len(set(warnings_of(caplog))) == len(warnings_of(caplog))


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 600, -1])
def test_a_file_that_was_cut_off_is_found(disk, num_bytes, caplog):
    disk.write(ENTRY, block())
    assert read(disk) is not None
    content = disk.path(ENTRY).read_bytes()
    disk.path(ENTRY).write_bytes(content[:num_bytes])
    assert read(disk) is None
    assert "damaged or cut off" in warnings_of(caplog)[0]


def test_a_file_that_is_longer_is_found_without_reading_it_whole(disk):
    disk.write(ENTRY, block())
    assert read(disk) is not None
    with disk.path(ENTRY).open("r+b") as file:
        file.truncate(2**40)  # sparse
    assert read(disk) is None


@pytest.mark.parametrize(
    ("written", "tensors", "reason"),
    [
        (replace(ENTRY, namespace=b"salt, bfloat16"), block(), "namespace"),
        (replace(ENTRY, token_ids=(*ENTRY.token_ids[:-1], 7)), block(), "other tokens"),
        (replace(ENTRY, token_ids=ENTRY.token_ids[:-1]), block(), "other tokens"),
        (replace(ENTRY, key=b"another"), block(), "key"),
        (replace(ENTRY, group=0), block(), "key"),
        (ENTRY, block(dtype="float32"), "shapes or dtypes"),
        (ENTRY, block(dtype="int8"), "names, shapes"),
        (ENTRY, {"keys": block()["keys"]}, "names, shapes"),
        (ENTRY, {name: tensor[:2] for name, tensor in block().items()}, "shapes"),
        (ENTRY, {name: tensor.reshape(2, 3, 4, 8) for name, tensor in block().items()}, "shapes"),
    ],
)
def test_another_block_under_the_same_name_is_not_used(disk, written, tensors, reason, caplog):
    disk.write(written, tensors)
    assert read(disk, written, layout(tensors)) is not None
    os.replace(disk.path(written), disk.path(ENTRY))
    assert read(disk) is None
    assert reason in warnings_of(caplog)[0]
    assert str(disk.path(ENTRY)) in warnings_of(caplog)[0]
    assert not disk.path(ENTRY).exists()


def test_another_version_is_not_used(disk, monkeypatch):
    monkeypatch.setattr(disk_module, "FORMAT_VERSION", 2)
    disk.write(ENTRY, block())
    assert read(disk) is not None
    monkeypatch.undo()
    assert read(disk) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_takes_nothing_loses_blocks_with_one_warning(disk, code, caplog, monkeypatch):
    kept = replace(ENTRY, key=b"kept")
    disk.write(kept, block())
    assert read(disk, kept) is not None

    def fail(source: str, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk_module.os, "replace", fail)
    disk.write(ENTRY, block())
    disk.write(replace(ENTRY, group=0), block())
    assert read(disk) is None
    assert same(read(disk, kept), block())
    assert disk.lost_entries() == [ENTRY, replace(ENTRY, group=0)]
    assert disk.lost_entries() == []
    [message] = warnings_of(caplog)
    assert os.strerror(code) in message and errno.errorcode[code] in message and str(disk.folder) in message
    assert "computed again" in message
    assert [file.name for file in disk.folder.iterdir()] == [disk.path(kept).name]  # nothing half done
    monkeypatch.undo()
    disk.write(ENTRY, block())
    assert same(read(disk), block())  # there is room again


def test_a_folder_that_goes_away_loses_blocks(disk, caplog):
    disk.folder.rename(disk.folder.with_name("elsewhere"))
    disk.write(ENTRY, block())
    assert read(disk) is None
    assert disk.lost_entries() == [ENTRY]
    disk.delete(ENTRY)
    disk.close()
    assert len(warnings_of(caplog)) == 1


def test_what_cannot_be_read_for_another_reason_is_kept(disk, monkeypatch, caplog):
    disk.write(ENTRY, block())
    assert read(disk) is not None

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_module.Path, "open", fail)
    assert read(disk) is None
    monkeypatch.undo()
    assert os.strerror(errno.EIO) in warnings_of(caplog)[0]
    assert same(read(disk), block())


def test_a_read_only_disk_still_reads(disk, monkeypatch):
    disk.write(ENTRY, block())
    assert read(disk) is not None

    def fail(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("utime", "replace", "unlink"):
        monkeypatch.setattr(disk_module.os, name, fail)
    assert same(read(disk), block())


def test_writes_that_pile_up_are_lost_at_once(tmp_path, caplog):
    size = sum(tensor.nbytes for tensor in block().values())
    disk = DiskBlocks(tmp_path, MIB, max_queued_bytes=2 * size)
    entries = [replace(ENTRY, key=bytes([index])) for index in range(5)]
    started, go = Future(), Future()

    class Slow:
        nbytes = size

        def __array__(self, dtype=None, copy=None):
            started.set_result(None)
            go.result(20)
            return block()["keys"]

    disk.write(entries[0], {"keys": Slow()})
    started.result(20)
    for entry in entries[1:]:
        disk.write(entry, block())
    go.set_result(None)
    disk.close()
    assert disk.lost_entries() == entries[2:]
    assert {key for key, *_ in disk.scan()} == {entry.key for entry in entries[:2]}
    assert len(warnings_of(caplog)) == 1


def test_close_gives_up_after_its_time(tmp_path, caplog):
    disk, go = DiskBlocks(tmp_path, MIB), Future()

    class Stuck:
        nbytes = 4

        def __array__(self, dtype=None, copy=None):
            go.result(20)
            return np.zeros(1, np.float32)

    disk.write(ENTRY, {"keys": Stuck()})
    late = disk.read(ENTRY, LAYOUT)
    disk.close(0.01)
    assert late.cancelled()
    go.set_result(None)
    assert str(tmp_path) in warnings_of(caplog)[0]


def test_a_fault_that_is_not_the_disks_is_not_hidden(disk):
    disk.write(ENTRY, {"keys": np.array(["not a tensor"])})
    read(disk)
    with pytest.raises(SafetensorError):
        disk.lost_entries()


def test_scan_is_in_order_of_use_and_within_the_budget(disk):
    entries = [replace(ENTRY, key=bytes([index] * 4), group=index % 2) for index in range(6)]
    for index, entry in enumerate(entries):
        disk.write(entry, block())
        assert read(disk, entry) is not None
        os.utime(disk.path(entry), (1000 + index, 1000 + index))
    assert read(disk, entries[1]) is not None  # used just now
    order = [entries[index] for index in (0, 2, 3, 4, 5, 1)]
    size = disk.path(DiskEntry(entries[0].key, 0, (), b"")).stat().st_size
    assert disk.scan() == [(entry.key, entry.group, size) for entry in order]
    disk.max_bytes = 3 * size + size // 2
    assert disk.scan() == [(entry.key, entry.group, size) for entry in order[3:]]
    assert {file for file in disk.folder.iterdir()} == {disk.path(entry) for entry in order[3:]}


def test_leftovers_go_and_foreign_files_stay(disk):
    old, young, foreign = (disk.folder / name for name in ("tmpold.unfinished", "tmpyoung.unfinished", "notes.txt"))
    for file in (old, young, foreign, disk.folder / "zz-0.safetensors", disk.folder / "abc-0.safetensors"):
        file.write_bytes(b"x")
    os.utime(old, (1000, 1000))
    os.utime(foreign, (1000, 1000))
    (disk.folder / "ab-0.safetensors").mkdir()
    assert disk.scan() == []
    assert not old.exists()
    assert young.exists() and foreign.exists()


def test_a_folder_that_cannot_be_made_or_read_is_a_wrong_option(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "kv"):
        with pytest.raises(ConfigError, match=r"--disk-kv-path .*file.* cannot be made a folder") as caught:
            DiskBlocks(path, MIB)
        assert caught.value.option == "--disk-kv-path"
    disk = DiskBlocks(tmp_path / "kv", MIB)
    disk.folder.rmdir()
    with pytest.raises(ConfigError, match=r"--disk-kv-path .*kv cannot be read: No such file"):
        disk.scan()
    disk.close()


WRITER = """
import sys, numpy as np
from pathlib import Path
from jaxinfer.kv.disk import DiskBlocks
from jaxinfer.messages import DiskEntry
disk = DiskBlocks(Path(sys.argv[1]), 2**20)
entry = DiskEntry(b"shared", 0, (1, 2, 3), b"")
for index in range(150):
    disk.write(entry, {"keys": np.full((64, 64), index, np.float32)})
    if index % 3 == 0:
        disk.delete(entry)
    disk.scan()
disk.write(entry, {"keys": np.zeros((64, 64), np.float32)})
assert "jax" not in sys.modules
disk.close()
assert disk.lost_entries() == []
"""


def test_two_processes_share_a_folder(disk, caplog):
    entry, shapes = DiskEntry(b"shared", 0, (1, 2, 3), b""), {"keys": ((64, 64), np.dtype(np.float32))}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(disk.folder)], cwd=Path(__file__).parents[2]) as other:
        while other.poll() is None:
            disk.write(entry, {"keys": np.full((64, 64), -1, np.float32)})
            tensors = read(disk, entry, shapes)
            assert tensors is None or len(np.unique(tensors["keys"])) == 1
            disk.delete(entry)
            disk.scan()
    assert other.returncode == 0
    assert disk.lost_entries() == []
    assert warnings_of(caplog) == []
