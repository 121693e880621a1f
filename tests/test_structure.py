"""What may be imported without jax. Which way imports go is checked by import-linter (`make check`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jaxinfer

ROOT = Path(__file__).parent.parent
WITHOUT_JAX = (
    "jaxinfer",
    "jaxinfer.errors",
    "jaxinfer.config",
    "jaxinfer.request",
    "jaxinfer.client",
    "jaxinfer.messages",
    "jaxinfer.sequence",
    "jaxinfer.scheduler",
    "jaxinfer.sampling_keys",
    "jaxinfer.kv.block_pool",
    "jaxinfer.kv.groups",
    "jaxinfer.cli.main",
)


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_the_host_side_does_without_jax(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'jax', 'jaxlib', 'flax', 'aiohttp'}} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")


def test_a_start_does_not_load_the_compiler_of_gpu_kernels() -> None:
    """It takes half a second, and only a kernel that runs needs it; nor does one depend on the insides of jax's interpreter."""
    late = "{'jax.experimental.pallas.mosaic_gpu', 'pallas_kernels.common.interpreter'}"
    program = f"import sys, jaxinfer.startup; print(sorted({late} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


def test_every_public_name_is_there() -> None:
    assert {name for name in jaxinfer.__all__ if getattr(jaxinfer, name).__name__ == name} == set(jaxinfer.__all__)
    assert set(jaxinfer.__all__) <= set(dir(jaxinfer))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = jaxinfer.Engin  # type: ignore[attr-defined]
