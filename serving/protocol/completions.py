"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import RequestError
from jaxinfer.request import SamplingParams
from serving.protocol.fields import GenerationBody, parse_body

DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody):
    """Completions' own fields; `prompt` is read by `parse_prompts`. Null `max_tokens` is the default 16."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def is_echo_only(self) -> bool:
        """Whether only the prompt is asked for, to look at its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def check_together(self) -> None:
        """Rules over several fields; raises RequestError."""
        super().check_together()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of is only supported equal to n ({self.n or 1}), got {self.best_of!r:.40}", param="best_of")

    def params(self, *, vocab_size: int, max_model_len: int) -> SamplingParams:
        """The engine's parameters. An echo-only request computes one token, which is left out of the answer.

        Raises:
            RequestError: naming the field.
        """
        over: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens}
        if self.is_echo_only:
            over["max_tokens"] = 1
        if self.echo and self.logprobs is not None:
            over["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.sampling_params(vocab_size=vocab_size, max_model_len=max_model_len, logprobs=self.logprobs, **over)


def parse_completion(body: Mapping[str, Any]) -> CompletionBody:
    """Raises RequestError for a body that is not a completion request."""
    completion = parse_body(CompletionBody, body, also_unsupported=frozenset({"tool_choice"}))
    completion.check_together()
    return completion
