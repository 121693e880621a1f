"""Write a checkpoint out as a Hugging Face or an Orbax folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.hf_folder import CONFIG_FILE, GENERATION_CONFIG_FILE
from jaxinfer.checkpoints.manifest import MANIFEST_FILE, UNFINISHED_SUFFIX, verify_folder, write_manifest
from jaxinfer.checkpoints.orbax_folder import total_bytes, write_orbax
from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.checkpoints.resolve import open_checkpoint
from jaxinfer.checkpoints.safetensors import write_safetensors_folder
from jaxinfer.checkpoints.source import LazyTensor
from jaxinfer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jaxinfer.checkpoints.load import Storage
    from jaxinfer.tokenizer import Tokenizer

Format = Literal["hf", "orbax"]
WrittenDtype = Literal["float32", "bfloat16", "float16"]
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
FORMATS = ("hf", "orbax")
DEFAULT_SHARD_BYTES = 5_000_000_000
MAX_ORBAX_SHARD_BYTES = 1_000_000_000
"""A shard of an Orbax folder is in memory as a whole while it is written."""
MIN_SHARD_BYTES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """What a conversion writes.

    `dtype` is that of floats; float32 by default, since dequantised values do not fit into bfloat16 without rounding. `storage`
    says which matrices are quantized or stay so, for Orbax only; None is none. `calibration` gives the windows of token ids, all of
    one length, that int4 matrices are calibrated on (`checkpoints.calibrate`). `is_verified`: the folder is read again and compared
    with its manifest, and so is the source if it has one.

    Raises:
        ConfigError: naming the option.
    """

    format: Format = "hf"
    dtype: WrittenDtype = "float32"
    storage: Storage | None = None
    calibration: Callable[[Tokenizer], Sequence[Sequence[int]]] | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    is_verified: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {self.format!r}", option="--format")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", option="--dtype")
        if self.storage is not None and (self.storage.method is not None or self.storage.keeps_packed) and self.format != "orbax":
            raise ConfigError("--quantization needs --format orbax: a Hugging Face folder is written in floats", option="--quantization")
        if self.calibration is not None and (self.storage is None or self.format != "orbax"):
            raise ConfigError("--calibrate needs --quantization int4 and --format orbax", option="--calibrate")
        if self.max_shard_bytes < MIN_SHARD_BYTES:
            raise ConfigError(
                f"--max-shard-bytes must be at least {MIN_SHARD_BYTES}, got {self.max_shard_bytes}", option="--max-shard-bytes"
            )


def convert(src: str, dst: Path, options: ConvertOptions | None = None) -> Path:
    """Write the model `src` (as `--model` takes it) to the new folder `dst`, which appears whole or not at all.

    Raises:
        ConfigError: `dst` exists and is not an empty folder.
        CheckpointError: `src` is damaged, or `dst` cannot be written.
    """
    options = options or ConvertOptions()
    _check_absent(dst)
    checkpoint = open_checkpoint(src)
    if options.is_verified and (checkpoint.path / MANIFEST_FILE).is_file():
        verify_folder(checkpoint.path)
    tokenizer = checkpoint.load_tokenizer()
    vocab_size = checkpoint.config.get("vocab_size")
    if isinstance(vocab_size, int) and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"has {tokenizer.vocab_size} tokens, more than config.json's vocab_size {vocab_size}",
            file=str(checkpoint.path),
            field="tokenizer",
        )
    tensors = checkpoint.tensors
    if options.storage is not None:
        from jaxinfer.checkpoints.quantize import stored_tensors  # late: it needs jax

        windows = () if options.calibration is None else options.calibration(tokenizer)
        tensors = stored_tensors(checkpoint, options.storage, windows)
    else:
        tensors = {name: replace(tensor, packed=None) for name, tensor in tensors.items()}
    config = {name: value for name, value in checkpoint.config.items() if name not in ("quantization_config", "dtype")}
    try:
        with _appearing_folder(dst) as folder:
            _write_json(folder / CONFIG_FILE, {**config, "torch_dtype": options.dtype})
            if checkpoint.generation_config:
                _write_json(folder / GENERATION_CONFIG_FILE, checkpoint.generation_config)
            tokenizer.save(folder)
            write_manifest(folder, options.format, _write_weights(folder, tensors, options))
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror or error}", file=str(error.filename or dst)) from error
    if options.is_verified:
        verify_folder(dst)
    return dst


def _check_absent(dst: Path) -> None:
    if dst.is_dir() and not any(dst.iterdir()):
        return
    if os.path.lexists(dst):
        raise ConfigError(f"DST {str(dst)!r} exists and is not an empty folder; give a new one")
    if dst.name.endswith(UNFINISHED_SUFFIX):
        raise ConfigError(f"DST {str(dst)!r} must not end with {UNFINISHED_SUFFIX}: nothing would open it")


def _write_weights(folder: Path, tensors: Mapping[str, LazyTensor], options: ConvertOptions) -> dict[str, Any]:
    """The weights' files; gives the manifest's `tensors`."""
    dtype = DTYPES[options.dtype]
    with byte_progress("writing weights", total_bytes(tensors, dtype)) as show:
        if options.format == "orbax":
            return write_orbax(folder, tensors, dtype, min(options.max_shard_bytes, MAX_ORBAX_SHARD_BYTES), show)
        write_safetensors_folder(folder, _reporting(tensors, dtype, show), dtype, options.max_shard_bytes)
        return {}


def _reporting(tensors: Mapping[str, LazyTensor], dtype: np.dtype, show: Callable[[int], None]) -> dict[str, LazyTensor]:
    """The same tensors, which tell `show` how far the writing is when they are read."""
    reporting, done = {}, 0
    for name, tensor in tensors.items():
        done += total_bytes({name: tensor}, dtype)

        def read(tensor: LazyTensor = tensor, done: int = done) -> np.ndarray:
            show(done)
            return tensor.read()

        reporting[name] = replace(tensor, read=read)
    return reporting


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _appearing_folder(dst: Path) -> Generator[Path]:
    """A temporary folder beside `dst` that takes its name when everything has been written, and is removed otherwise."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", suffix=UNFINISHED_SUFFIX, dir=dst.parent))
    try:
        yield work
        work.chmod(0o777 & ~_umask())
        os.rename(work, dst)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
