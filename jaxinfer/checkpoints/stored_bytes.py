"""Read a range of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxinfer.errors import CheckpointError


def read_stored_bytes(path: Path, field: str, offset: int, num_bytes: int) -> np.ndarray:
    """`num_bytes` bytes from `offset`, uint8. Read, not mapped: a file that shrinks meanwhile is an error and not a SIGBUS.

    Raises:
        CheckpointError: naming file and `field`, when the bytes are no longer there.
    """
    try:
        stored = np.fromfile(path, dtype=np.uint8, count=num_bytes, offset=offset)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=str(path), field=field) from error
    if stored.size != num_bytes:
        raise CheckpointError(f"the file changed while it was open: {stored.size} of {num_bytes} bytes left", file=str(path), field=field)
    return stored
