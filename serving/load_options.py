"""What a person may set about a load."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxinfer.config import option, option_name
from jaxinfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The load.

    Raises:
        ConfigError: naming the option, for any value out of its range.
    """

    base_url: str = option("http://127.0.0.1:8000", "where the server listens")
    api_key: str | None = option(None, "key to send; default: none")
    model: str | None = option(None, "model to ask for; default: the first that the server lists")
    num_prompts: int = option(200, "requests to send")
    max_concurrency: int = option(64, "requests in flight at once")
    request_rate: float = option(math.inf, "requests a second, at random intervals (Poisson); inf: as fast as concurrency allows")
    random_input_len: int = option(128, "tokens of each prompt")
    random_output_len: int = option(64, "tokens of each answer")
    seed: int = option(0, "seed of prompts and intervals")
    timeout: float = option(600.0, "seconds after which a request counts as failed")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_concurrency", "random_input_len", "random_output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{option_name(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("request_rate", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{option_name(name)} must be above 0, got {getattr(self, name)}")
