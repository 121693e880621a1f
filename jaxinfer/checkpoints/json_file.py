"""JSON read strictly: keys that appear twice, endless nesting and half files are errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxinfer.errors import CheckpointError

MAX_JSON_BYTES = 64 * 2**20
MAX_JSON_VALUES = 2_000_000
"""The index of the largest model has 0.1 million. Parsed, each takes up to 100 bytes."""


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: it is missing, cannot be read, is too large, or does not hold an object.
    """
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"has {size} bytes; at most {MAX_JSON_BYTES} are allowed", file=str(path))
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path)) from error
    return parse_json_object(text, file=str(path))


def parse_json_object(text: bytes, *, file: str, field: str | None = None) -> dict[str, Any]:
    """Parse one JSON object in UTF-8.

    Raises:
        CheckpointError: naming `file` and `field`.
    """

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"the key {twice[:200]!r} appears twice", file=file, field=field)
        return parsed

    num_values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if num_values > MAX_JSON_VALUES:
        raise CheckpointError(f"holds {num_values} values; at most {MAX_JSON_VALUES} are allowed", file=file, field=field)
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=without_repeats)
    except RecursionError as error:
        raise CheckpointError("is nested too deeply", file=file, field=field) from error
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError and integers of thousands of digits
        raise CheckpointError(f"is not valid JSON: {str(error)[:200]}", file=file, field=field) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"must be a JSON object, got {type(parsed).__name__}", file=file, field=field)
    return parsed
