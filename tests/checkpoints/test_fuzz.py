"""Mutated files of every format: only our errors, no hang, no jump in memory; each format in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.fuzz import MAX_JUMP_BYTES
from tests.checkpoints.mutations import MUTATIONS

NUM_FILES, NUM_NIGHTLY_FILES = 150, 5000


def check(format: str, count: int, seed: int, timeout: int) -> None:
    command = [sys.executable, "-m", "tests.checkpoints.fuzz", format, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["others"] == []
    assert result["refused"] + result["harmless"] == count
    assert result["refused"] > count // 4
    assert result["largest_jump_bytes"] < MAX_JUMP_BYTES


@pytest.mark.parametrize("format", MUTATIONS)
def test_damaged_files_are_refused_or_harmless(format: str) -> None:
    check(format, NUM_FILES, seed=0, timeout=110)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("format", MUTATIONS)
def test_five_thousand_damaged_files(format: str) -> None:
    check(format, NUM_NIGHTLY_FILES, seed=1, timeout=3500)
