"""Makes `.venv-peers`, where the peers are installed; standard library only, as it runs before anything is there."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
"""What every peer has wheels for."""
_VERSION_CODE = "import sys; print(sys.version_info[0], sys.version_info[1])"


class EnvironmentFailure(Exception):
    """The environment could not be made; the message says why."""


def find_python() -> str:
    """The first Python the peers have wheels for: `python3`, then the one running, then `python3.13` down to `python3.11`.

    Raises:
        EnvironmentFailure: there is none.
    """
    named = [f"python3.{minor}" for minor in range(NEWEST_PYTHON[1], OLDEST_PYTHON[1] - 1, -1)]
    for name in ("python3", sys.executable, *named):
        found = shutil.which(name)
        if found is None:
            continue
        answer = subprocess.run([found, "-c", _VERSION_CODE], capture_output=True, text=True, check=False)
        # A version manager's stub for a version that is not installed exists but fails.
        if answer.returncode == 0 and OLDEST_PYTHON <= tuple(map(int, answer.stdout.split())) <= NEWEST_PYTHON:
            return found
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
    raise EnvironmentFailure(f"the peers need a Python from {oldest} to {newest}; none of python3, {', '.join(named)} is there")


def _install(python: Path, requirements: Path) -> bool:
    """Install once: a stamp with the file's hash says that it was done."""
    stamp = python.parent.parent / f"{requirements.stem}.installed"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return True
    # Wheels only: building torch or OpenVINO from source would take hours before it failed.
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    if subprocess.run([*command, "-r", str(requirements)], stdout=sys.stderr, check=False).returncode != 0:
        return False
    stamp.write_text(digest)
    return True


def make_environment(folder: Path, *, with_transformers: bool) -> tuple[Path, bool]:
    """Make `folder` (a virtual environment) unless it is there: its Python, and whether transformers is in it.

    Raises:
        EnvironmentFailure: no Python, or the peers that must be there cannot be installed.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}", file=sys.stderr)
        subprocess.run([find_python(), "-m", "venv", str(folder)], check=True)
    if not _install(python, HERE / "requirements.txt"):
        raise EnvironmentFailure("llama.cpp (xllamacpp) and OpenVINO GenAI could not be installed; pip's message stands above")
    if not with_transformers:
        return python, False
    has_transformers = _install(python, HERE / "requirements-transformers.txt")
    if not has_transformers:
        print("torch and transformers could not be installed: that column is left out", file=sys.stderr)
    return python, has_transformers
