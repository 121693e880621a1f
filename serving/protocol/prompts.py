"""The `prompt` of completions: a string, token ids, or a list of either."""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import RequestError

MAX_PROMPTS = 1024
MAX_CHOICES = 4096
"""Prompts times n: each choice is a sequence with an answer of its own in memory."""

ALLOWED = "a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"


def parse_prompts(value: Any) -> list[str | list[int]]:
    """Every prompt as text or token ids, in order.

    Raises:
        RequestError: for any other shape, an empty prompt, or more than 1,024 prompts.
    """
    if isinstance(value, str) or _is_ids(value):
        prompts = [value]
    elif isinstance(value, list):
        if len(value) > MAX_PROMPTS:
            raise RequestError(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
        prompts = value
    else:
        raise _wrong(value)
    is_text = bool(prompts) and isinstance(prompts[0], str)
    for prompt in prompts:
        if not (isinstance(prompt, str) if is_text else _is_ids(prompt)) or not prompt:
            raise _wrong(prompt)
    if not prompts:
        raise _wrong(value)
    return prompts


def check_num_choices(num_prompts: int, n: int) -> None:
    """Raises RequestError for more choices than one request may have."""
    if num_prompts * n > MAX_CHOICES:
        raise RequestError(f"prompts times n must be at most {MAX_CHOICES}, got {num_prompts} times {n}", param="n")


def parse_token_ids(value: Any, param: str) -> list[int]:
    """A list of integers; their range is the engine's to check."""
    if not _is_ids(value):
        raise RequestError(f"{param} must be a non-empty list of token ids, got {value!r:.80}", param=param)
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _wrong(value: Any) -> RequestError:
    return RequestError(f"prompt must be {ALLOWED}, got {value!r:.80}", param="prompt")
