"""Checks that end in every way that a check can end, for the tests of the runner."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def well() -> dict[str, Any]:
    return {"answer": 42}


def refuses() -> dict[str, Any]:
    raise AssertionError("temporaries: at most 64 bytes allowed, got 65")


def fails() -> dict[str, Any]:
    raise ValueError("of the\ncompiler")


def crashes() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def leaves() -> dict[str, Any]:
    os._exit(3)


def hangs() -> dict[str, Any]:
    time.sleep(60)
    return {}


CHECKS = {check.__name__: check for check in (well, refuses, fails, crashes, leaves, hangs)}
