"""KV blocks as files: one per block, written and read by a thread, verified whole when they are read. No jax."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from jaxinfer.errors import ConfigError
from jaxinfer.messages import DiskEntry

logger = logging.getLogger(__name__)

BlockLayout = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Shape and dtype of each tensor of a block."""

FORMAT_VERSION = 1
NAME = re.compile(r"((?:[0-9a-f]{2})+)-(\d+)\.safetensors")
UNFINISHED = ".unfinished"
UNFINISHED_SECONDS = 600.0
"""A temporary file of this age belongs to nobody: a younger one may be another process's."""
MAX_QUEUED_BYTES = 2**28
MAX_HEADER_BYTES = 2**14
"""Of a file, beside key and namespace."""
TOKENS = "token_ids"
"""The tensor beside the block's own: int32, all tokens up to the block's end."""
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
}


class UnusableBlockError(Exception):
    """A file is not the block that was asked for; never leaves this module."""


class DiskBlocks:
    """A folder of KV blocks, and the thread that does everything with its files, in the order of the calls.

    What cannot be written is in `lost_entries` afterwards, what cannot be read is None: a disk that is full, read-only or
    gone makes service slower and is logged once per kind. Several processes may share a folder; each file appears whole by
    a rename, and one that another process removed is a failed read. What is bounded here is only what `scan` finds and
    what waits to be written; room is made by `delete`.

    Args:
        folder: made, readable by its owner only, if it is not there.
        max_bytes: `scan` removes the least recently used files beyond it.
        max_queued_bytes: a block that finds this much waiting to be written is lost at once.

    Raises:
        ConfigError: the folder cannot be made or is not a folder.
    """

    def __init__(self, folder: Path, max_bytes: int, *, max_queued_bytes: int = MAX_QUEUED_BYTES):
        self.folder = folder
        self.max_bytes = max_bytes
        self._max_queued_bytes = max_queued_bytes
        self._writes: deque[tuple[Future[None], int]] = deque()
        self._lost: deque[DiskEntry] = deque()
        self._warned: set[str] = set()
        self._is_closed = False
        self.takes_writes = True
        """False once the system refused one; what is lost because it came too fast does not count."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--disk-kv-path {folder} cannot be made a folder: {error.strerror}; give one that can be written", option="--disk-kv-path"
            ) from error
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk")

    def scan(self) -> list[tuple[bytes, int, int]]:
        """Key, group and bytes of every block in the folder, least recently used first, once the leftovers are removed.

        Raises:
            ConfigError: the folder cannot be read.
        """
        found: list[tuple[float, str, re.Match[str], int]] = []
        try:
            with os.scandir(self.folder) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):  # another process removed it
                        status, name = file.stat(), NAME.fullmatch(file.name)
                        if name and file.is_file():
                            found.append((status.st_mtime, file.path, name, status.st_size))
                        elif file.name.endswith(UNFINISHED) and status.st_mtime < time.time() - UNFINISHED_SECONDS:
                            _remove(file.path)
        except OSError as error:
            raise ConfigError(f"--disk-kv-path {self.folder} cannot be read: {error.strerror}", option="--disk-kv-path") from error
        found.sort(key=lambda file: file[:2])
        excess = sum(size for *_, size in found) - self.max_bytes
        kept = []
        for _, path, name, size in found:
            if excess > 0:
                excess -= size
                _remove(path)
            else:
                kept.append((bytes.fromhex(name[1]), int(name[2]), size))
        return kept

    # ---- what the owner calls ---------------------------------------------------------------------------------------

    def write(self, entry: DiskEntry, tensors: Mapping[str, Any]) -> None:
        """Queue a block; `tensors` are what `np.asarray` takes, and are only looked at by the thread."""
        self._settle()
        size = sum(tensor.nbytes for tensor in tensors.values())
        queued = sum(num_bytes for _, num_bytes in self._writes)
        if self._writes and queued + size > self._max_queued_bytes:
            self._lost.append(entry)
            self._warn("slow", "KV blocks leave host memory faster than %s takes them: some are dropped and computed again", self.folder)
            return
        self._writes.append((self._worker.submit(self._write, entry, tensors), size))

    def read(self, entry: DiskEntry, layout: BlockLayout) -> Future[dict[str, np.ndarray] | None]:
        """Queue the reading of a block; None when it is not there or is not this entry's, and the file is removed then."""
        return self._worker.submit(self._read, entry, layout)

    def delete(self, entry: DiskEntry) -> None:
        """Queue the removal of a block's file; one that is not there is no error."""
        self._worker.submit(self._delete, entry)

    def lost_entries(self) -> list[DiskEntry]:
        """What could not be written since this was last asked."""
        self._settle()
        return [self._lost.popleft() for _ in range(len(self._lost))]

    def close(self, max_seconds: float = 10.0) -> None:
        """Finish what is queued, within a time limit; the rest is dropped. Nothing may be queued afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._worker.submit(int).result(max_seconds)  # the last in the queue
        except TimeoutError:
            logger.warning("%s took more than %g s to write its last KV blocks: the rest is dropped", self.folder, max_seconds)
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._settle()

    def _settle(self) -> None:
        """Forget writes that are done; a fault that is not the disk's is raised here."""
        while self._writes and self._writes[0][0].done():
            future, _ = self._writes.popleft()
            if not future.cancelled():
                future.result()

    # ---- what the thread does ---------------------------------------------------------------------------------------

    def path(self, entry: DiskEntry) -> Path:
        """The file of a block."""
        return self.folder / f"{entry.key.hex()}-{entry.group}.safetensors"

    def _write(self, entry: DiskEntry, tensors: Mapping[str, Any]) -> None:
        content = encode(entry, {name: np.asarray(tensor) for name, tensor in tensors.items()})
        try:
            self._write_file(self.path(entry), content)
        except OSError as error:
            self.takes_writes = False
            self._lost.append(entry)
            self._warn(
                f"write {error.errno}",
                "a KV block could not be written to %s: %s (%s); the blocks that are there stay in use, no others are "
                "written before the next start: they are computed again",
                self.folder,
                error.strerror,
                errno.errorcode.get(error.errno or 0, "no errno"),
            )

    def _write_file(self, path: Path, content: bytes) -> None:
        """A file appears whole or not at all: another process may look for it at any time."""
        descriptor, temporary = tempfile.mkstemp(suffix=UNFINISHED, dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            _remove(temporary)
            raise

    def _read(self, entry: DiskEntry, layout: BlockLayout) -> dict[str, np.ndarray] | None:
        path = self.path(entry)
        try:
            with path.open("rb") as file:
                content = file.read(_most_bytes(entry, layout))  # of a file that is longer, the beginning does not pass
            tensors = decode(content, entry, layout)
        except FileNotFoundError:
            return None  # removed to make room, perhaps by another process
        except OSError as error:
            self._warn(f"read {error.errno}", "a KV block could not be read from %s: %s; it is computed again", path, error.strerror)
            return None
        except UnusableBlockError as error:
            self._warn(f"unusable {error}", "%s is not used, its tokens are computed again: %s", path, error)
            _remove(path)
            return None
        with contextlib.suppress(OSError):  # a read-only disk keeps its order
            os.utime(path)
        return tensors

    def _delete(self, entry: DiskEntry) -> None:
        if (error := _remove(self.path(entry))) is not None:
            self._warn(f"delete {error.errno}", "a KV block could not be removed from %s: %s", self.folder, error.strerror)

    def _warn(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message, *values)


def _remove(path: str | Path) -> OSError | None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _most_bytes(entry: DiskEntry, layout: BlockLayout) -> int:
    """A bound on the bytes of the entry's file."""
    tensors = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()) + 4 * len(entry.token_ids)
    return tensors + 2 * len(entry.key + entry.namespace) + MAX_HEADER_BYTES


def encode(entry: DiskEntry, tensors: Mapping[str, np.ndarray]) -> bytes:
    """The file of a block: always the same bytes for the same content, so that a reader can ask for exactly these."""
    all_tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    all_tensors[TOKENS] = np.array(entry.token_ids, np.int32)
    digest = hashlib.sha256()
    for name in sorted(all_tensors):
        digest.update(all_tensors[name].reshape(-1).view(np.uint8))
    about = {
        "version": FORMAT_VERSION,
        "key": entry.key.hex(),
        "group": entry.group,
        "namespace": entry.namespace.hex(),
        "sha256": digest.hexdigest(),
    }
    # One field of metadata: the order of several is not fixed.
    return save(all_tensors, metadata={"kv_block": json.dumps(about)})


def decode(content: bytes, entry: DiskEntry, layout: BlockLayout) -> dict[str, np.ndarray]:
    """The tensors of `layout`, from a file that is, byte for byte, what `encode` makes of them and `entry`.

    Raises:
        UnusableBlockError: anything in it is not as expected.
    """
    try:
        fields = dict(deserialize(content))
    except SafetensorError as error:
        raise UnusableBlockError("damaged or cut off") from error
    if any(field["dtype"] not in DTYPES for field in fields.values()):
        raise UnusableBlockError("a tensor has a dtype that no block has")
    tensors = {name: np.frombuffer(field["data"], DTYPES[field["dtype"]]).reshape(field["shape"]) for name, field in fields.items()}
    tokens = tensors.pop(TOKENS, None)
    if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} != dict(layout):
        raise UnusableBlockError("its tensors have other names, shapes or dtypes than this model's")
    if tokens is None or tuple(tokens.tolist()) != entry.token_ids:
        raise UnusableBlockError("it belongs to other tokens")
    # This compares the digest, and all that the parser skips or takes in more than one spelling.
    if encode(entry, tensors) != content:
        raise UnusableBlockError("its digest, key, namespace or version is another, so it is damaged or of another model")
    return tensors
