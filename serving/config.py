"""What a person may set about the server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config import OnOff, option
from jaxinfer.errors import ConfigError

MAX_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP server.

    Raises:
        ConfigError: naming the option, for any value out of its range.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = option(8000, "port to listen on; 0: any free one")
    api_key: Sequence[str] = option((), "key that clients must send as 'Authorization: Bearer KEY'; may be repeated; default: none")
    served_model_name: str | None = option(None, "the model's name in requests and answers; default: the model's own")
    max_body_bytes: int = option(4 << 20, "largest request body, before and after decompression")
    header_timeout: float = option(10.0, "seconds in which a client must send its request's headers")
    body_timeout: float = option(30.0, "seconds in which a client must send a request's body, or take a part of an answer")
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    max_queue: int | None = option(
        None, "requests that may wait for a place in the batch, each answer of n counted; more are refused with 429; default: any number"
    )
    debug_routes: OnOff = option("off", "serve /debug/kv, a page that draws the KV blocks and names the requests that hold them")
    step_timeout: float = option(30.0, "seconds that one engine step may take before /health reports the engine as hung")

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("--host must be an address or a name, got ''", option="--host")
        _check_int("--port", self.port, 0, 65_535)
        _check_int("--max-body-bytes", self.max_body_bytes, 1024, 1 << 30)
        if self.max_queue is not None:
            _check_int("--max-queue", self.max_queue, 1, 1 << 20)
        if self.debug_routes not in ("on", "off"):
            raise ConfigError(f"--debug-routes must be on or off, got {self.debug_routes!r}", option="--debug-routes")
        for name, low in (("header", 0.01), ("body", 0.01), ("shutdown", 0.0), ("step", 0.01)):
            _check_seconds(f"--{name}-timeout", getattr(self, f"{name}_timeout"), low)
        object.__setattr__(self, "api_key", (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key))
        if not all(isinstance(key, str) and key.strip() == key != "" for key in self.api_key):
            raise ConfigError("--api-key must not be empty or start or end with white space", option="--api-key")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("--served-model-name must not be empty", option="--served-model-name")


def _check_int(option_name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{option_name} must be an integer from {low} to {high}, got {value!r}", option=option_name)


def _check_seconds(option_name: str, value: float, low: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= MAX_SECONDS:
        raise ConfigError(f"{option_name} must be a number of seconds from {low:g} to {MAX_SECONDS:g}, got {value!r}", option=option_name)
