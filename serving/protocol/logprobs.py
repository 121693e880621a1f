"""Log-probabilities in OpenAI's two shapes and vLLM's one for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.request import PositionLogprobs, TokenLogprob
from jaxinfer.tokenizer import Tokenizer

LOWEST = -9999.0
"""JSON has no -Infinity; OpenAI writes this number."""


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text, or `bytes:\\x..` for a piece of a character, so that different pieces have different names."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def num_chars_started(raw: bytes) -> int:
    """How many characters begin within these bytes of UTF-8 text."""
    return sum((byte & 0xC0) != 0x80 for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token.token_id)
        return {"token": token_label(tokenizer, token.token_id), "logprob": max(token.logprob, LOWEST), "bytes": list(raw)}

    content = [entry(position.chosen) | {"top_logprobs": [entry(token) for token in position.top]} for position in positions]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], offset: int
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of a completion, and the text offset behind its last token.

    `offset` is where the first token stands in the choice's text. The chosen token is always among `top_logprobs`.
    """
    shape: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, position in zip(token_ids, positions, strict=True):
        shape["tokens"].append(token_label(tokenizer, token_id))
        shape["text_offset"].append(offset)
        offset += num_chars_started(tokenizer.token_bytes(token_id))
        if position is None:
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            continue
        shape["token_logprobs"].append(max(position.chosen.logprob, LOWEST))
        best = {}
        for token in (*position.top, position.chosen):
            best.setdefault(token_label(tokenizer, token.token_id), max(token.logprob, LOWEST))
        shape["top_logprobs"].append(best)
    return shape, offset


def prompt_logprobs(tokenizer: Tokenizer, positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: per position a map of token id to log-probability, rank and text; null for the first."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"logprob": max(token.logprob, LOWEST), "rank": token.rank, "decoded_token": token_label(tokenizer, token.token_id)}

    return [
        None if position is None else {str(token.token_id): entry(token) for token in (*position.top, position.chosen)}
        for position in positions
    ]
