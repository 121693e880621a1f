"""Checks that the measurements' options share."""

from __future__ import annotations

from typing import Any

from jaxinfer.config import option_name
from jaxinfer.errors import ConfigError


def check_at_least(options: Any, low: int, *names: str) -> None:
    """Refuse fields below `low`.

    Raises:
        ConfigError: naming the option.
    """
    for name in names:
        if getattr(options, name) < low:
            raise ConfigError(f"{option_name(name)} must be at least {low}, got {getattr(options, name)}", option=option_name(name))
