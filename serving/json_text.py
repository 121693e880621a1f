"""JSON as a server must read and write it: finite, without duplicate keys, of bounded depth, in clean Unicode.

Python's own reader takes NaN, 1e999, duplicate keys, lone surrogates and nesting up to its recursion limit.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 64
"""No field takes a longer number; quadratic conversion of huge ones is thereby out of reach."""

# Possessive quantifiers keep a string of megabytes from filling the matcher's stack; the closing quote is optional so that
# text of unclosed strings is not searched again from each of its quotes.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
# Legal inside JSON strings, but line ends to str.splitlines, with which some clients cut streams into lines.
_LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


class JsonError(ValueError):
    """The text is not JSON that we take; the message says why."""


def parse_json(text: str) -> Any:
    """Read one JSON document.

    Raises:
        JsonError: for malformed text, NaN or infinity, numbers of more than 64 characters, duplicate keys, lone
            surrogates, nesting deeper than 64.
    """
    _check_depth(text)
    try:
        value = json.loads(
            text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant, parse_int=_parse_int, parse_float=_parse_float
        )
    except json.JSONDecodeError as error:
        raise JsonError(f"{error.msg} at character {error.pos}") from error
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value)
    return value


def dump_json(value: Any) -> bytes:
    """Write JSON as UTF-8 on one line, whatever a client takes for the end of a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char, escaped in _LINE_ENDS.items():
        if char in text:
            text = text.replace(char, escaped)
    return text.encode("utf-8", errors="replace")


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match[0]
        if bracket in ("{", "["):
            depth += 1
            if depth > MAX_DEPTH:
                raise JsonError(f"nested too deeply: at most {MAX_DEPTH} levels are allowed")
        elif bracket in ("}", "]"):
            depth -= 1


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JsonError(f"key {twice!r:.80} appears twice in one object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARS:
        raise JsonError(f"a number of {len(digits)} characters is too long: at most {MAX_NUMBER_CHARS} are allowed")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits) if len(digits) <= MAX_NUMBER_CHARS else math.inf
    if not math.isfinite(value):
        raise JsonError(f"number {digits:.20} is too large or too long")
    return value


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise JsonError("a string has half of a surrogate pair, which is no character") from error
