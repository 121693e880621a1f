"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class TokenizeBody(BaseModel):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """Token ids to turn into text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = None
    tokens: Any
    skip_special_tokens: bool | None = None
