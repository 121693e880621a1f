"""`jaxinfer.json`: what a converted folder holds, with the sha256 of every file in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoints.json_file import read_json_file
from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.errors import CheckpointError, UnsupportedModelError

MANIFEST_FILE = "jaxinfer.json"
FORMAT_VERSION = 1
HF, ORBAX = "hf", "orbax"
"""What a folder's weights are: safetensors, or Orbax checkpoints."""
UNFINISHED_SUFFIX = ".unfinished"
"""Of the folder that a conversion writes into. One that was killed leaves it behind; nothing opens it."""


def write_manifest(folder: Path, format: str, tensors: Mapping[str, Any]) -> None:
    """Hash every file that is in the folder now, and write the manifest beside them."""
    listed = {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in _files(folder).items()}
    manifest = {"format": format, "format_version": FORMAT_VERSION, "tensors": tensors, "files": listed}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its outline checked: `format` is a string, `tensors` and `files` are objects.

    Raises:
        CheckpointError: it is missing or damaged.
        UnsupportedModelError: another version of the format.
    """
    path = folder / MANIFEST_FILE
    manifest = read_json_file(path)
    version = manifest.get("format_version")
    if type(version) is not int:
        raise CheckpointError(f"must be an integer, got {str(version)[:60]}", file=str(path), field="format_version")
    if version != FORMAT_VERSION:
        raise UnsupportedModelError(f"{path}: format_version {version} is not supported; supported: {FORMAT_VERSION}")
    for field, kind in (("format", str), ("tensors", dict), ("files", dict)):
        if not isinstance(manifest.get(field), kind):
            raise CheckpointError(f"must be a {kind.__name__}, got {str(manifest.get(field))[:60]}", file=str(path), field=field)
    return manifest


def verify_folder(folder: Path) -> int:
    """Compare every file of a converted folder with its manifest; gives how many there are.

    Raises:
        CheckpointError: naming the first file that is missing, of another size or content, or not listed.
    """
    if not (folder / MANIFEST_FILE).is_file():
        raise CheckpointError(f"the folder has no {MANIFEST_FILE}: only what `jaxinfer convert` wrote can be verified", file=str(folder))
    listed, found = read_manifest(folder)["files"], _files(folder)
    for name in sorted(set(listed) | set(found)):
        if name not in found:
            raise CheckpointError(f"the file is missing, {MANIFEST_FILE} lists it", file=str(folder / name))
        if name not in listed:
            raise CheckpointError(f"{MANIFEST_FILE} does not list this file", file=str(folder / name))
    total = sum(path.stat().st_size for path in found.values())
    with byte_progress(f"verifying {folder.name}", total) as show:
        done = 0
        for name, path in found.items():
            _verify_file(path, listed[name], folder / MANIFEST_FILE, name)
            done += path.stat().st_size
            show(done)
    return len(found)


def _verify_file(path: Path, listed: Any, manifest: Path, name: str) -> None:
    if not isinstance(listed, dict) or set(listed) != {"bytes", "sha256"}:
        raise CheckpointError("must have bytes and sha256", file=str(manifest), field=f"files: {name[:200]}")
    if path.stat().st_size != listed["bytes"]:
        raise CheckpointError(f"has {path.stat().st_size} bytes, {MANIFEST_FILE} says {str(listed['bytes'])[:60]}", file=str(path))
    if (got := _sha256(path)) != listed["sha256"]:
        raise CheckpointError(f"sha256 is {got}, {MANIFEST_FILE} says {str(listed['sha256'])[:80]}", file=str(path))


def _files(folder: Path) -> dict[str, Path]:
    """Every file but the manifest, by its path within the folder."""
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix(): path for path in paths if path != folder / MANIFEST_FILE}


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from error
