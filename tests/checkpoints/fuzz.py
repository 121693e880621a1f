"""Mutated files through the parsers, in a process with a limit on memory: `python -m tests.checkpoints.fuzz FORMAT COUNT SEED`.

Prints one JSON object: how many files were refused, how many were harmless, the largest jump of memory, and what else was raised.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from jaxinfer.checkpoints import open_checkpoint
from jaxinfer.checkpoints.convert import ConvertOptions, convert
from jaxinfer.checkpoints.source import Checkpoint
from jaxinfer.errors import JaxInferError
from jaxinfer.tokenizer import Tokenizer
from tests.checkpoints.checkpoint_files import gguf_tensors, hf_tensors, write_gguf
from tests.checkpoints.mutations import MUTATIONS

MAX_CPU_SECONDS = 2.0
MAX_JUMP_BYTES = 300 * 2**20
MAX_REPORTED = 5
MODELS_DIR = Path(__file__).parents[1] / "models" / "goldens"


class TookTooLong(BaseException):
    """Not an Exception: nothing between here and the parser may take it for its own."""


def read_all(path: Path) -> None:
    """Open it, and read every tensor that has come through."""
    checkpoint = open_checkpoint(str(path))
    checkpoint.load_tokenizer()
    for tensor in checkpoint.tensors.values():
        assert tensor.read().shape == tensor.shape


def tokenize(path: Path) -> None:
    """Read the tokenizer, there and back, and a turn of chat."""
    tokenizer = Tokenizer.from_folder(path)
    ids = tokenizer.encode("hey \u00f6\n<|im_end|>")
    tokenizer.decode(ids)
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": "hey"}])


def declare(path: Path) -> None:
    """Open it, read the configuration, and give the model's parameters their places."""
    import jax.numpy as jnp

    from jaxinfer import sharding
    from jaxinfer.checkpoints.load import Storage, declare_parameters
    from jaxinfer.models.config import find

    checkpoint: Checkpoint = open_checkpoint(str(path))
    architecture = find(checkpoint.config, str(path / "config.json"))
    config = architecture.Config.from_hf(checkpoint.config, str(path / "config.json"))
    mesh = sharding.make_mesh(1)
    model = architecture.Model(config, mesh, jnp.dtype(jnp.float32), min(config.max_positions, 64))
    declare_parameters(model, mesh, checkpoint, Storage(), config.unused_tensors)
    architecture.kv_groups(config, "float32")


def whole_checkpoints(format: str, folder: Path) -> list[Path]:
    """The folders, or one, that are copied and damaged."""
    tensors, name, kind = gguf_tensors(hf_tensors()), "blk.0.ffn_down.weight", GGMLQuantizationType.Q4_1
    tensors[name] = quantize(tensors[name], kind)
    source = write_gguf(folder / "model.gguf", tensors, kinds={name: kind}, vocabulary=True)
    if format == "gguf":
        (folder / "gguf").mkdir()
        source.rename(folder / "gguf" / "model.gguf")
        return [folder / "gguf"]
    if format in ("safetensors", "tokenizer"):
        return [convert(str(source), folder / "hf", ConvertOptions(max_shard_bytes=40_000))]
    if format == "orbax":
        from jaxinfer.checkpoints.load import Storage
        from jaxinfer.quant.weight import method

        storage = Storage(method=method("int4", 32, True), vocabulary=Storage())
        return [convert(str(source), folder / "orbax", ConvertOptions(format="orbax", storage=storage, max_shard_bytes=60_000))]
    assert format == "config", format
    copied = []
    for model in sorted(path.parent for path in MODELS_DIR.glob("*/model.safetensors")):
        (folder / model.name).mkdir()
        shutil.copy(model / "config.json", folder / model.name / "config.json")
        (folder / model.name / "model.safetensors").symlink_to(model / "model.safetensors")
        copied.append(folder / model.name)
    return copied


USES: dict[str, Callable[[Path], None]] = {"config": declare, "tokenizer": tokenize}


def run(format: str, count: int, seed: int) -> dict[str, Any]:
    """Damage, open, and count."""
    result: dict[str, Any] = {"refused": 0, "harmless": 0, "others": [], "largest_jump_bytes": 0}
    use = USES.get(format, read_all)

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    signal.signal(signal.SIGPROF, too_long)
    with tempfile.TemporaryDirectory() as name:
        wholes = whole_checkpoints(format, Path(name))
        for whole in wholes:
            use(whole / "model.gguf" if format == "gguf" else whole)
        limit_memory()
        for index in range(count):
            rng = random.Random(f"{format} {seed} {index}")
            damaged = Path(shutil.copytree(rng.choice(wholes), Path(name) / "damaged", symlinks=True))
            MUTATIONS[format](damaged, rng)
            before = peak_bytes()
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
            try:
                use(damaged / "model.gguf" if format == "gguf" else damaged)
                result["harmless"] += 1
            except JaxInferError:
                result["refused"] += 1
            except BaseException as error:
                if len(result["others"]) < MAX_REPORTED:
                    result["others"].append(f"{index}: " + "".join(traceback.format_exception(error)[-3:]))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                shutil.rmtree(damaged)
            result["largest_jump_bytes"] = max(result["largest_jump_bytes"], peak_bytes() - before)
    return result


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_memory() -> None:
    """Little more address space than is used now: what jax keeps of thousands of models, and one jump."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 4 * MAX_JUMP_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
