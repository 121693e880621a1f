"""Hugging Face Hub ids -> a local folder."""

from __future__ import annotations

import re
from pathlib import Path

from jaxinfer.errors import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
FILES = ("*.json", "model*.safetensors", "*.jinja", "merges.txt", "tokenizer.model")
"""Weights, configuration and vocabulary; neither pickles nor code."""


def is_hub_id(model: str) -> bool:
    """Whether the text has the form `organisation/name`."""
    return HUB_ID.fullmatch(model) is not None


def hub_folder(model: str) -> Path:
    """The folder of a Hub id, downloaded into huggingface_hub's own cache when it is not there.

    Raises:
        ConfigError: the Hub cannot be reached and nothing is cached, or it does not have the model.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=list(FILES), ignore_patterns=["*/*"]))
    except (OSError, httpx2.HTTPError, HFValidationError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"--model {model!r} is no file or folder here, and the Hugging Face Hub did not give it: {first_line}", option="--model"
        ) from error
