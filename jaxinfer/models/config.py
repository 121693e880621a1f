"""Reading a model's configuration strictly: what is neither used nor known to be harmless is an error."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxinfer import models
from jaxinfer.errors import CheckpointError, UnsupportedModelError

HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "is_llama_config",
        "rope_interleaved",
        "transformers.js_config",
        "pretraining_tp",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
    ]
)
"""Attributes that say nothing of the forward pass."""


class ConfigReader:
    """Takes attributes out of a config.json one by one; `finish` refuses what is left."""

    def __init__(self, config: Mapping[str, Any], file: str):
        self._config = config
        self._file = file
        self._left = set(config) - HARMLESS

    def _typed(self, name: str, value: Any, kind: type) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"must be {kind.__name__}, got {value!r:.60}", file=self._file, field=name)
        return value

    def required(self, name: str, kind: type) -> Any:
        """An attribute that must be there."""
        self._left.discard(name)
        if self._config.get(name) is None:
            raise CheckpointError("is missing", file=self._file, field=name)
        return self._typed(name, self._config[name], kind)

    def positive(self, name: str, default: int | None = None) -> int:
        """A count: an integer from 1 to 2**31 - 1."""
        value = self.required(name, int) if default is None else self.optional(name, int, default)
        if not 1 <= value < 2**31:
            raise CheckpointError(f"must be from 1 to {2**31 - 1}, got {value}", file=self._file, field=name)
        return value

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """An attribute that has a default; null counts as absent."""
        self._left.discard(name)
        value = self._config.get(name)
        return default if value is None else self._typed(name, value, kind)

    def only(self, name: str, *allowed: Any) -> None:
        """An attribute that is supported with these values alone; null and absent count as the first."""
        self._left.discard(name)
        value = self._config.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(f"{self._file}: {name} = {value!r:.80} is not supported, only {', '.join(map(repr, allowed))}")

    def finish(self) -> None:
        """Refuse every attribute that has been neither read nor listed as harmless, unless it is null or false."""
        unused = sorted(name for name in self._left if self._config[name] not in (None, False, {}, []))
        if unused:
            raise UnsupportedModelError(f"{self._file}: {unused[0]} = {self._config[unused[0]]!r:.80} is not supported by this model")


def find(config: Mapping[str, Any], file: str) -> ModuleType:
    """The module of a configuration's `model_type`.

    Raises:
        CheckpointError: no `model_type`.
        UnsupportedModelError: no file of that name.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError("is missing", file=file, field="model_type")
    # The name becomes part of an import: nothing but an identifier may pass.
    if re.fullmatch(r"[a-z][a-z0-9_]*", model_type) and model_type != "config":
        try:
            return importlib.import_module(f"jaxinfer.models.{model_type}")
        except ModuleNotFoundError:
            pass
    known = sorted(module.name for module in pkgutil.iter_modules(models.__path__) if module.name != "config")
    raise UnsupportedModelError(f"{file}: model_type {model_type!r:.60} is not supported; there is: {', '.join(known)}")
