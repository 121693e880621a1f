"""A Chromium for the browser tests, installed when there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium_path() -> str | None:
    """Where it is; None: playwright's own, which has just been downloaded.

    The distribution's package is tried first where that is allowed, for playwright's own comes from a host of its own and
    lacks system libraries.
    """
    if (found := _found()) is not None:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-y", "-q", "--no-install-recommends", "chromium"]):
            subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)
        if (found := _found()) is not None:
            return found
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)
    return None


def _found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)
