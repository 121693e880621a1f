"""What a person writes after `--model` -> Checkpoint."""

from __future__ import annotations

import os.path
from dataclasses import replace
from pathlib import Path

from jaxinfer.checkpoints.hf_folder import CONFIG_FILE, open_hf_folder
from jaxinfer.checkpoints.hub import hub_folder, is_hub_id
from jaxinfer.checkpoints.manifest import HF, MANIFEST_FILE, ORBAX, UNFINISHED_SUFFIX, read_manifest
from jaxinfer.checkpoints.orbax_folder import open_orbax_folder
from jaxinfer.checkpoints.pull import PRESETS, find_preset, pulled_path
from jaxinfer.checkpoints.safetensors import PICKLE_SUFFIXES
from jaxinfer.checkpoints.source import Checkpoint
from jaxinfer.errors import CheckpointError, ConfigError

GGUF_SUFFIX = ".gguf"
FILE_SUFFIXES = (GGUF_SUFFIX, ".safetensors", ".json", *PICKLE_SUFFIXES)


def open_checkpoint(model: str) -> Checkpoint:
    """Open a model: an existing GGUF file, Hugging Face or Orbax folder, else a preset's name, else a Hub id.

    A preset and a Hub model are downloaded when they are not cached. No weights are read.

    Raises:
        ConfigError: nothing of that name.
        CheckpointError: it is there, but damaged or incomplete.
        UnsupportedModelError: it is whole, but of a kind that is not implemented.
    """
    given = os.path.expanduser(model)
    if os.path.isfile(given):
        return _open_file(Path(given))
    if os.path.isfile(os.path.join(given, CONFIG_FILE)):
        return _open_folder(Path(given))
    if (preset := find_preset(model)) is not None:
        return replace(_open_file(pulled_path(preset)), name=preset.name)
    if os.path.isdir(given):
        raise CheckpointError(f"the folder has no {CONFIG_FILE}, so it is no Hugging Face model", file=given)
    if is_hub_id(model) and not model.endswith(FILE_SUFFIXES):
        return open_hf_folder(hub_folder(model), name=model)
    raise ConfigError(
        f"--model {model[:200]!r} was not found; allowed: a preset ({', '.join(preset.name for preset in PRESETS)}), a GGUF file, "
        "a Hugging Face folder with config.json and safetensors, a folder that `jaxinfer convert` wrote, or a Hub id such as org/name",
        option="--model",
    )


def _open_folder(folder: Path) -> Checkpoint:
    if folder.resolve().name.endswith(UNFINISHED_SUFFIX):
        raise CheckpointError("a conversion that was interrupted left this folder; remove it and convert again", file=str(folder))
    if (folder / MANIFEST_FILE).exists():
        kind = read_manifest(folder)["format"]
        if kind == ORBAX:
            return open_orbax_folder(folder)
        if kind != HF:
            raise CheckpointError(f"must be {HF!r} or {ORBAX!r}, got {kind[:60]!r}", file=str(folder / MANIFEST_FILE), field="format")
    return open_hf_folder(folder)


def _open_file(path: Path) -> Checkpoint:
    if path.name.endswith(PICKLE_SUFFIXES):
        raise CheckpointError("loading a pickle runs code, so it is refused; give a GGUF file or a folder with safetensors", file=str(path))
    if path.name.endswith(".safetensors"):
        raise CheckpointError("give the folder that holds it and config.json", file=str(path))
    from jaxinfer.checkpoints.gguf import open_gguf  # late: a folder needs no gguf package

    return open_gguf(path)
