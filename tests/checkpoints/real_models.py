"""The optional models, for the tests that are run once per issue: naming one pulls it."""

from __future__ import annotations

from pathlib import Path

from jaxinfer.checkpoints.pull import preset_named, pull


def pulled(name: str) -> Path:
    """The preset's GGUF in the user's cache, downloaded when it is not there."""
    return pull(preset_named(name))
