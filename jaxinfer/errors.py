"""Every exception that jaxinfer raises on purpose.

A message says what is wrong, what was got, what is allowed and, where it helps, what to do. Anything else that
escapes is a bug.
"""

from __future__ import annotations


class JaxInferError(Exception):
    """Base of every exception raised on purpose."""


class ConfigError(JaxInferError):
    """A deployment option is wrong; `option` is its name as a person writes it (`--block-size`)."""

    def __init__(self, message: str, *, option: str | None = None):
        super().__init__(message)
        self.option = option


class RequestError(JaxInferError):
    """One request is wrong; the server answers 400 and nothing else is touched. `param` is the field's name."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class QueueFullError(JaxInferError):
    """Too many requests wait already; the server answers 429. `retry_after_seconds`: when a place is likely to be free."""

    def __init__(self, message: str, *, retry_after_seconds: int):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UnsupportedModelError(JaxInferError):
    """The model, or an attribute of its configuration, is not implemented; the message names it."""


class CheckpointError(JaxInferError):
    """A file of weights, configuration or vocabulary is missing, damaged or does not fit; names file and field."""

    def __init__(self, message: str, *, file: str, field: str | None = None):
        super().__init__(f"{file}: {field + ': ' if field else ''}{message}")
        self.file = file
        self.field = field


class EngineDeadError(JaxInferError):
    """The engine has stopped after a fault of its own; the server answers 503."""


class KVCorruptionError(JaxInferError):
    """A KV block came back from host memory with other bytes than were stored (only looked for with `--kv-checksums on`).

    It ends the engine and not one request: memory that lost a bit is to be trusted with nothing else.
    """
