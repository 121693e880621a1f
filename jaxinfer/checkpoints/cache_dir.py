"""Where files that can be made again are kept."""

from __future__ import annotations

from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder for jaxinfer (`~/.cache/jaxinfer` on Linux; XDG_CACHE_HOME is honoured). It may not exist yet."""
    import platformdirs  # late: who names a folder does without it

    return Path(platformdirs.user_cache_dir("jaxinfer", appauthor=False))
