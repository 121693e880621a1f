"""jaxinfer: an LLM inference engine compiled by JAX/XLA.

The public names are imported on first use, so that `import jaxinfer.scheduler` and `jaxinfer --help` do without jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig
    from jaxinfer.engine import Engine
    from jaxinfer.errors import CheckpointError, ConfigError, EngineDeadError, JaxInferError, RequestError, UnsupportedModelError
    from jaxinfer.llm import LLM
    from jaxinfer.request import RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "JaxInferError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedModelError",
]


def _module_of(name: str) -> str | None:
    match name:
        case "LLM":
            return "jaxinfer.llm"
        case "Engine":
            return "jaxinfer.engine"
        case "EngineConfig":
            return "jaxinfer.config"
        case "RequestOutput" | "SamplingParams":
            return "jaxinfer.request"
        case _ if name in __all__:
            return "jaxinfer.errors"
    return None


def __getattr__(name: str) -> Any:
    module = _module_of(name)
    if module is None:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
