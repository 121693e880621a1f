"""Write a checkpoint out as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.hf_folder import CONFIG_FILE, GENERATION_CONFIG_FILE
from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.checkpoints.resolve import open_checkpoint
from jaxinfer.checkpoints.safetensors import SINGLE_FILE, write_safetensors
from jaxinfer.checkpoints.source import Checkpoint, LazyTensor
from jaxinfer.errors import CheckpointError, ConfigError

WrittenDtype = Literal["float32", "bfloat16", "float16"]
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
FORMATS = ("hf",)


def convert(src: str, dst: Path, *, format: str = "hf", dtype: WrittenDtype = "float32") -> Path:
    """Write the model `src` (as `--model` takes it) to the new folder `dst`, which appears whole or not at all.

    float32 by default: dequantised values do not fit into bfloat16 without rounding.

    Raises:
        ConfigError: unknown format or dtype, or `dst` exists and is not an empty folder.
        CheckpointError: `src` is damaged, or `dst` cannot be written.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {format!r}", option="--format")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}", option="--dtype")
    _check_absent(dst)
    checkpoint = open_checkpoint(src)
    tokenizer = checkpoint.load_tokenizer()
    try:
        with _appearing_folder(dst) as folder:
            _write_json(folder / CONFIG_FILE, {**checkpoint.config, "torch_dtype": dtype})
            if checkpoint.generation_config:
                _write_json(folder / GENERATION_CONFIG_FILE, checkpoint.generation_config)
            tokenizer.save(folder)
            _write_weights(folder / SINGLE_FILE, checkpoint, DTYPES[dtype])
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror or error}", file=str(error.filename or dst)) from error
    return dst


def _check_absent(dst: Path) -> None:
    if dst.is_dir() and not any(dst.iterdir()):
        return
    if os.path.lexists(dst):
        raise ConfigError(f"DST {str(dst)!r} exists and is not an empty folder; give a new one")


def _write_weights(path: Path, checkpoint: Checkpoint, dtype: np.dtype) -> None:
    total = sum(prod(tensor.shape) * dtype.itemsize for tensor in checkpoint.tensors.values())
    with byte_progress(f"writing {path.name}", total) as show:
        write_safetensors(path, dict(_reporting(checkpoint.tensors, dtype, show)), dtype)


def _reporting(tensors: Mapping[str, LazyTensor], dtype: np.dtype, show: Callable[[int], None]) -> Iterator[tuple[str, LazyTensor]]:
    """The same tensors, which tell `show` how far the writing is when they are read."""
    done = 0
    for name, tensor in tensors.items():
        done += prod(tensor.shape) * dtype.itemsize

        def read(tensor: LazyTensor = tensor, done: int = done) -> np.ndarray:
            show(done)
            return tensor.read()

        yield name, replace(tensor, read=read)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _appearing_folder(dst: Path) -> Generator[Path]:
    """A temporary folder beside `dst` that takes its name when everything has been written, and is removed otherwise."""
    dst.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dst.name}.", dir=dst.parent))
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
