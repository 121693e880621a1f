"""The `tokenizer.*` metadata of a GGUF file, checked: tokens, types, merges, ids (llama.cpp's docs/gguf.md)."""

from __future__ import annotations

from typing import Any

from gguf.constants import TokenType

from jaxinfer.checkpoints.gguf_header import GGUFHeader
from jaxinfer.errors import CheckpointError

TOKENS_KEY, TYPES_KEY, MERGES_KEY = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
MAX_TOKENS = 4 * 1024 * 1024


class VocabularyFields:
    """The `tokenizer.*` fields of one GGUF file, each checked for its type as it is read."""

    def __init__(self, header: GGUFHeader):
        self._metadata = header.metadata
        self.file = str(header.path)
        self.architecture = header.metadata.get("general.architecture")

    def error(self, key: str, message: str) -> CheckpointError:
        """A CheckpointError that names the file and the field."""
        return CheckpointError(message, file=self.file, field=key)

    def get(self, key: str, kind: type) -> Any:
        """A scalar field of this type, None when the file has none."""
        value = self._metadata.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
            raise self.error(key, f"must be of type {kind.__name__}, got {value!r:.80}")
        return value

    def get_list(self, key: str, kind: type) -> list[Any] | None:
        """An array field with elements of this type, None when the file has none."""
        value = self._metadata.get(key)
        if value is not None and (not isinstance(value, list) or not all(isinstance(item, kind) for item in value)):
            raise self.error(key, f"must be an array of {kind.__name__}, got {value!r:.80}")
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        """The id in `tokenizer.ggml.<name>_token_id`, None when the file has none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.get(key, int)
        if value is not None and not 0 <= value < num_tokens:
            raise self.error(key, f"must be from 0 to {num_tokens - 1}, got {value}")
        return value

    def tokens(self) -> tuple[list[str], list[int]]:
        """Texts and types of all tokens, by id, without the unused ones at the end.

        Raises:
            CheckpointError: there are none, or too many, or two are the same, or the types do not fit.
        """
        tokens = self.get_list(TOKENS_KEY, str)
        if not tokens or len(tokens) > MAX_TOKENS:
            raise self.error(TOKENS_KEY, f"must hold 1 to {MAX_TOKENS} tokens, got {len(tokens or ())}")
        types = self.get_list(TYPES_KEY, int) or [int(TokenType.NORMAL)] * len(tokens)
        if len(types) != len(tokens):
            raise self.error(TYPES_KEY, f"must have one type per token ({len(tokens)}), got {len(types)}")
        types = list(types)
        while types and types[-1] == TokenType.UNUSED:
            types.pop()
        tokens = tokens[: len(types)]
        if len(set(tokens)) != len(tokens) or "" in tokens:
            raise self.error(TOKENS_KEY, f"must be different and not empty, got {len(set(tokens) - {''})} such of {len(tokens)}")
        return tokens, types

    def merges(self) -> list[tuple[str, str]] | None:
        """The merges in their order, None when the file has none.

        Raises:
            CheckpointError: one is not two pieces.
        """
        texts = self.get_list(MERGES_KEY, str)
        if texts is None:
            return None
        merges: list[tuple[str, str]] = []
        for k, text in enumerate(texts):
            left, _, right = text.partition(" ")
            if not left or not right or " " in right:
                raise self.error(MERGES_KEY, f"must be two pieces with a space between them, got {text!r:.80} at {k}")
            merges.append((left, right))
        return merges
