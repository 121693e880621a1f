"""`jaxinfer doctor` reports and never fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from jaxinfer.cli.doctor import format_bytes

RunProcess = Callable[..., subprocess.CompletedProcess[str]]


def test_a_report_without_a_cache(run_process: RunProcess, tmp_path: Path) -> None:
    ended = run_process("doctor", env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert ended.returncode == 0
    for expected in (version("jax"), "cpu:0", "paged_attention", str(tmp_path / "jaxinfer"), "jaxinfer pull smollm2-135m"):
        assert expected in ended.stdout
    assert "paged_attention  native" in ended.stdout
    # To see whether the C++ kernel can be chosen is to build it, which is kept; nothing of jaxinfer's own is made.
    assert [path.name for path in tmp_path.iterdir()] == ["pallas_kernels"]


def test_a_cache_is_measured(run_process: RunProcess, tmp_path: Path) -> None:
    folder = tmp_path / "jaxinfer" / "compiled" / "deep"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * 1024)
    (folder / "b").write_bytes(b"x" * 512)
    ended = run_process("doctor", env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert "compiled  1.5 KiB in 2 files" in ended.stdout


def test_a_platform_that_does_not_start_is_reported(run_process: RunProcess) -> None:
    ended = run_process("doctor", env={**os.environ, "JAX_PLATFORMS": "no_such_platform"})
    assert ended.returncode == 0
    assert "jax finds no device" in ended.stdout
    assert "no_such_platform" in ended.stdout
    assert "unknown without a device" in ended.stdout


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**40, "3.0 TiB")]
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
