"""What chat and completion answers have in common: head, usage, and the events of a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxinfer.request import CompletionOutput, FinishReason, PositionLogprobs, RequestDelta, RequestOutput
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request; `text` is what echo gives back."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """What the body says about the answer's shape."""

    response_id: str
    created: int
    model: str
    n: int
    has_logprobs: bool = False
    has_token_ids: bool = False
    has_prompt_logprobs: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    echo: bool = False
    is_echo_only: bool = False


def usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage`; a prompt counts once however many answers it gets."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def without_tokens(output: CompletionOutput) -> CompletionOutput:
    """What an echo-only request shows of the token that had to be computed."""
    is_whole = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    return CompletionOutput(output.index, finish_reason=FinishReason.LENGTH if is_whole else output.finish_reason)


class Answer(ABC):
    """Formats one request's answer, whole or as a stream's events."""

    WHOLE_OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]

    def __init__(self, options: AnswerOptions, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        self.options = options
        self.prompts = prompts
        self.tokenizer = tokenizer
        self._num_tokens = 0
        self._num_cached = [0] * len(prompts)
        self._started: set[int] = set()
        self._prompt_logprobs: dict[int, list[PositionLogprobs | None]] = {}

    @abstractmethod
    def whole_choice(self, index: int, prompt: Prompt, request: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        """One entry of `choices`."""

    @abstractmethod
    def first_choices(self, index: int, prompt: Prompt, logprobs: Sequence[PositionLogprobs | None]) -> list[dict[str, Any]]:
        """Entries that go before a choice's first delta: a role, an echo; `logprobs` are the prompt's."""

    @abstractmethod
    def delta_choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """One entry of `choices` in a stream."""

    def whole_extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Further fields of the whole answer's top level."""
        return {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer of a request that was not streamed; choice i * n + j is answer j to prompt i."""
        choices = [
            self.whole_choice(position * self.options.n + output.index, self.prompts[position], request, output)
            for position, request in enumerate(outputs)
            for output in request.outputs
        ]
        self._num_tokens = 0 if self.options.is_echo_only else sum(len(o.token_ids) for request in outputs for o in request.outputs)
        self._num_cached = [request.num_cached_tokens for request in outputs]
        return self._head(self.WHOLE_OBJECT) | {"choices": choices, "usage": self._usage()} | self.whole_extras(outputs)

    def events(self, position: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """The stream's events for one delta of the prompt at `position`; steps that add nothing to see give none."""
        self._num_cached[position] = max(self._num_cached[position], delta.num_cached_tokens)
        if delta.prompt_logprobs:
            self._prompt_logprobs[position] = delta.prompt_logprobs
        events = []
        for output in delta.outputs:
            index = position * self.options.n + output.index
            if index not in self._started:
                self._started.add(index)
                first = self.first_choices(index, self.prompts[position], self._prompt_logprobs.get(position, ()))
                events += [self._event(choice) for choice in first]
            if self.options.is_echo_only:
                output = without_tokens(output)
            self._num_tokens += len(output.token_ids)
            shows_tokens = (self.options.has_logprobs or self.options.has_token_ids) and output.token_ids
            if output.text or output.finish_reason or shows_tokens:
                events.append(self._event(self.delta_choice(index, output)))
        return events

    def last_events(self) -> list[dict[str, Any]]:
        """What comes behind all choices: the usage, if asked for."""
        return [self._head(self.CHUNK_OBJECT) | {"choices": [], "usage": self._usage()}] if self.options.has_usage else []

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = self._head(self.CHUNK_OBJECT) | {"choices": [choice]}
        return event | {"usage": self._usage()} if self.options.has_running_usage else event

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.options.response_id, "object": kind, "created": self.options.created, "model": self.options.model}

    def _usage(self) -> dict[str, Any]:
        return usage(sum(len(prompt.token_ids) for prompt in self.prompts), self._num_tokens, sum(self._num_cached))
