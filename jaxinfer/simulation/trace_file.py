"""Requests from a file of JSON lines, read as they arrive.

A line is an object: `arrival` (seconds, never falling), `output_tokens`, one of `prompt_token_ids` (a list) and
`prompt_tokens` (their number), and optionally `hash_ids` (beside `prompt_tokens`: equal numbers are equal text, each
stands for `hash_block_tokens` tokens, as in the traces of Mooncake, Qin et al. 2024), `user` and `priority`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.simulation.options import LARGEST, TraceOptions
from jaxinfer.simulation.traces import NAMES, Texts, TraceRequest

KNOWN = ("arrival", "output_tokens", "prompt_tokens", "prompt_token_ids", "hash_ids", "user", "priority")
MAX_PROMPT = 2**24


class TraceFile:
    """The requests of one file.

    Raises:
        ConfigError: naming the line, for what is not as the module says; while reading.
    """

    def __init__(self, options: TraceOptions, path: Path):
        self.num_requests = options.num_requests
        self._path = path
        self._hash_block = options.hash_block_tokens or 512
        self._texts = Texts(options.trace_seed, 2**16)
        self._num_line = 0
        if not path.is_file():
            raise ConfigError(f"--trace-file must be a file of JSON lines, got {str(path)!r:.200}", option="--trace-file")

    def requests(self) -> Iterator[TraceRequest]:
        """All lines, or the first `num_requests`."""
        last = 0.0
        with self._path.open(encoding="utf-8") as lines:
            for index, line in enumerate(islice((line for line in lines if self._counts(line)), self.num_requests)):
                request = self._parse(index, line)
                if request.arrival_seconds < last:
                    raise self._error(f"arrival must not fall, got {request.arrival_seconds:g} after {last:g}")
                last = request.arrival_seconds
                yield request

    def next_turn(self, request: TraceRequest, end_seconds: float) -> TraceRequest | None:
        """None: a file says when everything arrives."""
        return None

    def _counts(self, line: str) -> bool:
        self._num_line += 1
        return not line.isspace()

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"--trace-file {str(self._path)!r}, line {self._num_line}: {what}", option="--trace-file")

    def _parse(self, index: int, line: str) -> TraceRequest:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise self._error(f"not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise self._error(f"must be an object, got {type(entry).__name__}")
        unknown = sorted(set(entry) - set(KNOWN))
        if unknown:
            raise self._error(f"unknown fields {', '.join(unknown)}; known: {', '.join(KNOWN)}")
        arrival = entry.get("arrival")
        if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival <= 1e12:
            raise self._error(f"arrival must be seconds from 0 to 1e12, got {arrival!r:.80}")
        user = entry.get("user", "")
        if not isinstance(user, str):
            raise self._error(f"user must be a string, got {user!r:.80}")
        num_output_tokens = self._int(entry, "output_tokens", 1, LARGEST)
        return TraceRequest(
            float(arrival), self._prompt(index, entry), num_output_tokens, user, self._int(entry, "priority", -LARGEST, LARGEST, 0)
        )

    def _int(self, entry: dict[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
        value = entry.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._error(f"{name} must be an integer from {low} to {high}, got {value!r:.80}")
        return value

    def _prompt(self, index: int, entry: dict[str, Any]) -> tuple[int, ...]:
        if ("prompt_tokens" in entry) == ("prompt_token_ids" in entry):
            raise self._error("must have one of prompt_tokens and prompt_token_ids")
        hash_ids = self._ids(entry, "hash_ids", NAMES // 2)
        if "prompt_token_ids" in entry:
            if hash_ids:
                raise self._error("hash_ids stand beside prompt_tokens, not beside prompt_token_ids")
            return self._ids(entry, "prompt_token_ids", 2**31)
        length = self._int(entry, "prompt_tokens", 1, MAX_PROMPT)
        if len(hash_ids) * self._hash_block >= length + self._hash_block:
            raise self._error(f"{len(hash_ids)} hash_ids of {self._hash_block} tokens are more than prompt_tokens {length}")
        # Even names are equal text, odd ones a request's own.
        blocks = [self._text(2 * hash_id, self._hash_block) for hash_id in hash_ids]
        known = tuple(token_id for block in blocks for token_id in block)[:length]
        return known + self._text(2 * index + 1, length - len(known))

    def _text(self, name: int, length: int) -> tuple[int, ...]:
        whole = self._texts.text(name % NAMES, min(length, 2**16))
        return (whole * -(-length // 2**16))[:length] if length > 2**16 else whole

    def _ids(self, entry: dict[str, Any], name: str, limit: int) -> tuple[int, ...]:
        ids = entry.get(name, [])
        if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < limit for one in ids):
            raise self._error(f"{name} must be a list of integers from 0 to {limit - 1}, got {ids!r:.80}")
        return tuple(ids)
