"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.request import SamplingParams
from serving.protocol.fields import GenerationBody, parse_body

UNSUPPORTED_HERE = frozenset({"echo", "best_of"})


class ChatBody(GenerationBody):
    """Chat's own fields; `messages` is read by `parse_messages`."""

    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    tool_choice: Any = None

    def check_together(self) -> None:
        """Rules over several fields; raises RequestError."""
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs: true", param="top_logprobs")
        if self.tool_choice not in (None, "none"):
            raise RequestError("tool_choice is not supported by this server", param="tool_choice")

    def params(self, *, vocab_size: int, max_model_len: int) -> SamplingParams:
        """The engine's parameters: without max_tokens an answer may fill the context.

        Raises:
            RequestError: naming the field by its name in a chat.
        """
        is_new_name = self.max_completion_tokens is not None
        names = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens" if is_new_name else "max_tokens"}
        try:
            return self.sampling_params(
                vocab_size=vocab_size,
                max_model_len=max_model_len,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                max_tokens=self.max_completion_tokens if is_new_name else self.max_tokens,
            )
        except RequestError as error:
            if error.param not in names:
                raise
            raise RequestError(str(error).replace(error.param, names[error.param], 1), param=names[error.param]) from error


def parse_chat(body: Mapping[str, Any]) -> ChatBody:
    """Raises RequestError for a body that is not a chat request."""
    chat = parse_body(ChatBody, body, also_unsupported=UNSUPPORTED_HERE)
    chat.check_together()
    return chat
