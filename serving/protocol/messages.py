"""The `messages` of a chat, reduced to what a chat template reads: role and text."""

from __future__ import annotations

from typing import Any

from jaxinfer.errors import RequestError

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant")
IGNORED_KEYS = frozenset({"name", "refusal", "annotations"})
"""What clients send back of an earlier answer, or for their own use."""
UNSUPPORTED_KEYS = frozenset({"tool_calls", "function_call", "tool_call_id", "audio", "reasoning_content", "reasoning", "prefix"})


def parse_messages(value: Any) -> list[dict[str, str]]:
    """Messages as {"role", "content"} with text only; `developer` is read as `system`.

    Raises:
        RequestError: naming the message, as in `messages[2]`.
    """
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        got = f"{len(value)} messages" if isinstance(value, list) else f"{value!r:.80}"
        raise RequestError(f"messages must be a list of 1 to {MAX_MESSAGES} messages, got {got}", param="messages")
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _parse_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(where, f"an object with role and content, got {message!r:.80}")
    role = message.get("role")
    if role in ("tool", "function"):
        raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}: tools are not supported by this server")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}, got {role!r:.80}")
    for key in message.keys() - IGNORED_KEYS - {"role", "content"}:
        if key not in UNSUPPORTED_KEYS:
            raise RequestError(f"{where} has an unknown field: {key:.60}", param=f"{where}.{key:.60}")
        if message[key]:
            raise RequestError(f"{where}.{key} is not supported by this server", param=f"{where}.{key}")
    return {"role": "system" if role == "developer" else role, "content": _parse_content(message.get("content"), f"{where}.content")}


def _parse_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(where, f"a string or a list of text parts, got {content!r:.80}")
    return "\n".join(_parse_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _parse_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(where, f'an object such as {{"type": "text", "text": "..."}}, got {part!r:.80}')
    if part.get("type") != "text":
        raise _wrong(f"{where}.type", f"'text': this server reads text only, got {part.get('type')!r:.40}")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", f"a string, got {part.get('text')!r:.80}")
    return part["text"]


def _wrong(where: str, allowed: str) -> RequestError:
    return RequestError(f"{where} must be {allowed}", param=where)
