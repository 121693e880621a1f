"""One platform for every test: four virtual CPU devices, strict dtypes and ranks; and the models that tests share."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported; GPU tests set it themselves

from pathlib import Path

import jax
import pytest

from jaxinfer.checkpoints.cache_dir import cache_dir
from tests.tiny_llama import write_tiny_llama

# For meshes, and as threads for kernels whose warpgroups are interpreted side by side.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Engines of different tests share most of their programs, and the next run shares all of them.
jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, pulled into the user's cache when it is not there."""
    from jaxinfer.checkpoints.pull import find_preset, pull

    preset = find_preset("smollm2-135m")
    assert preset is not None
    return pull(preset)


@pytest.fixture(scope="session")
def compile_cache_dir() -> Path:
    """Compiled programs that outlive the test run, so that the next one only loads them."""
    return cache_dir() / "compiled-tests"


@pytest.fixture(scope="session")
def tiny_llama(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Llama with 2 layers of random float32 weights and SmolLM2's tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny_llama", tokenizer_from=smollm2_path)
